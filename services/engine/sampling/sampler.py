"""One batched pass from logits to tokens and log probabilities. It never waits for the device.

All but masks gather and scatter the entries that there are; no other table of the vocabulary's size is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from catenary.sequence_limits import MAX_TOP_LOGPROBS
from services.engine.device import Device
from services.engine.sampling.draw import Scaled, draw_filtered, draw_plain, first_argmax
from services.engine.sampling.inputs import Allowed, Edits, Masks, Penalties, SamplerInputs
from services.engine.sampling.rows import PACKED_HEAD, RowStatus, best

NO_TOKEN = -1


def adjust(raw: torch.Tensor, inputs: SamplerInputs, last_tokens: torch.Tensor) -> torch.Tensor:
    """raw float32 [R, V] with bias and bans added, then penalised, then cut to the allowed ids and masks.

    The order is that of transformers and vLLM. `raw` itself is returned if there is nothing to do, and never
    changed. last_tokens int64: what `pending_rows` points into.
    """
    if all(part is None for part in (inputs.edits, inputs.penalties, inputs.allowed, inputs.masks)):
        return raw
    scores = raw.clone()
    pending = _pending(inputs, last_tokens)
    if inputs.edits is not None:
        _add(scores, inputs.edits, pending)
    if inputs.penalties is not None:
        _penalize(scores, inputs.penalties, pending)
    if inputs.allowed is not None:
        scores = _keep_allowed(scores, inputs.allowed)
    if inputs.masks is not None:
        _mask(scores, inputs.masks)
    return scores


def _pending(inputs: SamplerInputs, last_tokens: torch.Tensor) -> torch.Tensor | None:
    """Each row's token that is not known to the host yet, int64 [R], or NO_TOKEN; None if no row has one."""
    if inputs.pending_rows is None or inputs.is_pending is None:
        return None
    waiting = last_tokens.index_select(0, inputs.pending_rows)
    return torch.where(inputs.is_pending, waiting, NO_TOKEN)


def _add(scores: torch.Tensor, edits: Edits, pending: torch.Tensor | None) -> None:
    # A sum, since several entries may speak of one token: one bias at the most, and bans.
    values = edits.values
    if pending is not None:
        holds = (edits.conditions == NO_TOKEN) | (edits.conditions == pending.index_select(0, edits.rows))
        values = torch.where(holds, values, 0.0)
    scores.view(-1).index_add_(0, edits.rows * scores.shape[1] + edits.ids, values)


def _penalize(scores: torch.Tensor, given: Penalties, pending: torch.Tensor | None) -> None:
    """Penalises every seen token once by its counts, the pending one included."""
    flat = given.rows * scores.shape[1] + given.ids
    after = penalized(
        scores.view(-1).index_select(0, flat),
        given.generated,
        given.repetition.index_select(0, given.rows),
        given.frequency.index_select(0, given.rows),
        given.presence.index_select(0, given.rows),
    )
    if pending is None:
        scores.view(-1).index_copy_(0, flat, after)
        return
    # The pending token's own entry, if it has one, is overwritten by what its raised count gives.
    repeats = torch.where(given.ids == pending.index_select(0, given.rows), given.generated, 0.0)
    earlier = torch.zeros_like(given.presence).scatter_reduce(0, given.rows, repeats, "amax")
    token = pending.clamp_min(0).unsqueeze(1)
    raised = penalized(
        scores.gather(1, token).squeeze(1), earlier + 1, given.repetition, given.frequency, given.presence
    )
    scores.view(-1).index_copy_(0, flat, after)
    kept = scores.gather(1, token).squeeze(1)
    scores.scatter_(1, token, torch.where(pending >= 0, raised, kept).unsqueeze(1))


def penalized(
    scores: torch.Tensor,
    generated: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """All [N]. Repetition as in CTRL (arXiv 1909.05858), the others as OpenAI's reference defines them."""
    scores = torch.where(scores < 0, scores * repetition, scores / repetition)
    return scores - frequency * generated - presence.masked_fill(generated <= 0, 0.0)


def _mask(scores: torch.Tensor, masks: Masks) -> None:
    chosen = scores.index_select(0, masks.index).masked_fill(~masks.allowed, -torch.inf)
    scores.index_copy_(0, masks.index, chosen)


def _keep_allowed(scores: torch.Tensor, allowed: Allowed) -> torch.Tensor:
    flat = allowed.rows * scores.shape[1] + allowed.ids
    kept = scores.view(-1).index_select(0, flat)
    scores = scores.masked_fill(allowed.restricted.unsqueeze(1), -torch.inf)
    scores.view(-1).index_copy_(0, flat, kept)
    return scores


def logprob_columns(
    logits: torch.Tensor, tokens: torch.Tensor, alternatives: bool, device: Device
) -> torch.Tensor:
    """logits float32 [A, V], tokens int64 [A] -> [A, 1 + 2 * n]: log probability, n best ids, their values.

    n is MAX_TOP_LOGPROBS (or V) or 0, whatever number a row asks for, so that ties are broken alike whoever
    is in the batch.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(1, tokens.unsqueeze(1)).to(device.capabilities.wide_dtype)
    if not alternatives:
        return own
    values, ids = logprobs.topk(min(MAX_TOP_LOGPROBS, logits.shape[1]), dim=-1)
    return torch.cat(
        (own, ids.to(device.capabilities.wide_dtype), values.to(device.capabilities.wide_dtype)), dim=1
    )


def beam_columns(scores: torch.Tensor, device: Device) -> torch.Tensor:
    """scores float32 [B, V], adjusted log probabilities -> [B, 1 + 2 * n] as `logprob_columns` gives them.

    The first column is that of the best token.
    """
    values, ids = scores.topk(min(MAX_TOP_LOGPROBS, scores.shape[1]), dim=-1)
    columns = (values[:, :1], ids.to(device.capabilities.wide_dtype), values)
    return torch.cat([column.to(device.capabilities.wide_dtype) for column in columns], dim=1)


def prompt_logprobs(logits: torch.Tensor, targets: torch.Tensor, top_n: int, device: Device) -> torch.Tensor:
    """Log probabilities of prompt tokens, for `unpack_prompt`: logits [R, V] of the tokens before them,
    targets int64 [R] the tokens themselves, `top_n` the most alternatives that any row asks for."""
    return logprob_columns(logits.float(), targets, top_n > 0, device)


def unpack_prompt(host: torch.Tensor, top_n: int) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Reads rows of `prompt_logprobs` on the host: each token's log probability and its `top_n` alternatives.

    A value is NaN if the row's logits were not finite.
    """
    width = (host.shape[1] - 1) // 2
    return [(values[0], best(values[1:], width, top_n)) for values in host.tolist()]


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """A step's tokens int64 [R], and all that the host wants to know as one tensor [R, 3 + 2 * n].

    Columns: token, RowStatus, log probability, n ids of the best alternatives, n log probabilities.
    """

    tokens: torch.Tensor
    packed: torch.Tensor


def sample(
    logits: torch.Tensor, inputs: SamplerInputs, last_tokens: torch.Tensor, device: Device
) -> SampledBatch:
    """Samples each row of logits [R, V] by its own parameters.

    last_tokens int64: the newest token of each sequence, which pending rows point into. Whatever is in the
    batch, a row's result depends on its logits, its parameters, its tokens and (seed, position) alone. The
    order is that of transformers and vLLM: bias, bans, penalties, allowed ids, masks; temperature; top-k,
    top-p of what it left, min-p; the draw.
    """
    if logits.shape[0] != inputs.padded_rows:
        raise ValueError(f"{logits.shape[0]} rows of logits for {inputs.padded_rows} rows of parameters")
    raw = logits.float()
    if inputs.beams is not None:
        # Beams add up log probabilities, and what is edited are these.
        normal = torch.log_softmax(raw.index_select(0, inputs.beams), dim=-1)
        raw = raw.index_copy(0, inputs.beams, normal)
    scores = adjust(raw, inputs, last_tokens)
    tokens = first_argmax(scores)
    best = scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
    # The maximum is NaN if anything in the row is, infinite if something overflowed. Allowed ids and masks
    # hide logits.
    hidden = inputs.allowed is not None or inputs.masks is not None
    largest = raw.amax(-1) if hidden else best
    if inputs.plain is not None:
        drawn = draw_plain(Scaled(scores, best, inputs.plain), device)
        tokens.index_copy_(0, inputs.plain.index, drawn)
    if inputs.filtered is not None:
        draws, filters = inputs.filtered
        drawn = draw_filtered(Scaled(scores, best, draws), filters, device)
        tokens.index_copy_(0, draws.index, drawn)
    packed = _pack(raw, tokens, _status(largest, best), inputs, device)
    if inputs.beams is not None:
        columns = beam_columns(scores.index_select(0, inputs.beams), device)
        packed[:, PACKED_HEAD - 1 :].index_copy_(0, inputs.beams, columns)
    return SampledBatch(tokens, packed)


def _status(largest: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """RowStatus of rows, int64 [R]: `best` is the largest score, `largest` the largest of the logits."""
    status = torch.where(best == -torch.inf, RowStatus.NOTHING_LEFT, RowStatus.SAMPLED)
    # Penalties and biases may overflow what was finite.
    unusable = largest.isnan() | (largest == torch.inf) | (best == torch.inf)
    return status.masked_fill(unusable, RowStatus.NOT_FINITE)


def _pack(
    raw: torch.Tensor, tokens: torch.Tensor, status: torch.Tensor, inputs: SamplerInputs, device: Device
) -> torch.Tensor:
    """One float tensor makes one copy; ids below 2**24 are exact even in float32."""
    head = torch.stack(
        (tokens.to(device.capabilities.wide_dtype), status.to(device.capabilities.wide_dtype)), dim=1
    )
    if inputs.asked is None:
        return torch.cat((head, torch.zeros_like(head[:, :1])), dim=1)
    chosen = raw.index_select(0, inputs.asked)
    columns = logprob_columns(chosen, tokens.index_select(0, inputs.asked), inputs.alternatives, device)
    packed = head.new_zeros((head.shape[0], PACKED_HEAD - 1 + columns.shape[1]))
    packed[:, :2] = head
    packed[:, 2:].index_copy_(0, inputs.asked, columns)
    return packed
