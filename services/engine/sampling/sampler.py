"""One batched pass from logits to tokens and log probabilities. It never waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.engine.device import Device
from services.engine.sampling.adjust import adjust
from services.engine.sampling.chunks import first_argmax
from services.engine.sampling.draw import Scaled, draw_filtered, draw_plain
from services.engine.sampling.inputs import SamplerInputs
from services.engine.sampling.logprobs import beam_columns, logprob_columns
from services.engine.sampling.rows import PACKED_HEAD, RowStatus


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
    head = torch.stack((tokens.to(device.wide_dtype), status.to(device.wide_dtype)), dim=1)
    if inputs.asked is None:
        return torch.cat((head, torch.zeros_like(head[:, :1])), dim=1)
    chosen = raw.index_select(0, inputs.asked)
    columns = logprob_columns(chosen, tokens.index_select(0, inputs.asked), inputs.alternatives, device)
    packed = head.new_zeros((head.shape[0], PACKED_HEAD - 1 + columns.shape[1]))
    packed[:, :2] = head
    packed[:, 2:].index_copy_(0, inputs.asked, columns)
    return packed
