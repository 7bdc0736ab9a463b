"""Changes of logits before anything is drawn: bias and bans, penalties, allowed ids, masks of constraints.

All but masks gather and scatter the entries that there are; no other table of the vocabulary's size is kept.
"""

from __future__ import annotations

import torch

from services.engine.sampling.inputs import Allowed, Edits, Masks, Penalties, SamplerInputs

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
