"""One batched pass from logits to tokens and log probabilities, with one copy to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from catenary.schema import MAX_TOP_LOGPROBS
from catenary.seeds import uniform
from services.engine.device import Device
from services.engine.sampling.draw import draw
from services.engine.sampling.rows import RowParams, SampledToken, unpack


def sample(logits: torch.Tensor, rows: list[RowParams], device: Device) -> list[SampledToken]:
    """Samples each row of logits [R, V] by its own parameters. Results come in the order of the rows.

    Whatever is in the batch, a row's token depends on its logits, its parameters and (seed, position) alone.
    """
    if logits.shape[0] != len(rows):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} rows of parameters")
    if not rows:
        return []
    return unpack(device.to_host(sample_batch(logits, rows, device).packed), rows)


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """Tokens int64 [R], for the device's next step, and what `unpack` reads on the host."""

    tokens: torch.Tensor
    packed: torch.Tensor


def sample_batch(logits: torch.Tensor, rows: list[RowParams], device: Device) -> SampledBatch:
    """The same, left on the device. logits [P, V] with P >= R: the first rows count, the rest are padding."""
    raw = logits[: len(rows)].float()
    # The maximum is NaN if anything in the row is, infinite if something overflowed.
    finite = raw.amax(-1).isfinite()
    scores = _masked(raw, rows, device)
    tokens = scores.argmax(-1)
    _draw_random_rows(scores, tokens, rows, device)
    return SampledBatch(tokens, _pack(raw, tokens, finite, rows, device))


def _masked(raw: torch.Tensor, rows: list[RowParams], device: Device) -> torch.Tensor:
    vocab = raw.shape[1]
    pairs = [(index, token) for index, row in enumerate(rows) for token in row.masked_ids if token < vocab]
    if not pairs:
        return raw
    row_ids, token_ids = device.to_device(torch.tensor(pairs, dtype=torch.int64).t().contiguous())
    scores = raw.clone()
    scores[row_ids, token_ids] = -torch.inf
    return scores


def _draw_random_rows(
    scores: torch.Tensor, tokens: torch.Tensor, rows: list[RowParams], device: Device
) -> None:
    """Replaces the tokens of the rows that are not greedy."""
    chosen = [index for index, row in enumerate(rows) if not row.greedy]
    if not chosen:
        return
    wide = device.wide_dtype
    params = [rows[index] for index in chosen]
    index = device.to_device(torch.tensor(chosen, dtype=torch.int64))
    top_k = device.to_device(torch.tensor([row.top_k for row in params], dtype=torch.int64))
    columns = [[row.temperature, row.top_p, uniform(row.seed, row.position)] for row in params]
    values = device.to_device(torch.tensor(columns, dtype=wide))
    subset = scores.index_select(0, index)
    # Shifted first: the best score stays 0 however small the temperature is.
    subset -= subset.amax(-1, keepdim=True)
    subset /= values[:, :1].float().clamp_min(1e-30)
    tokens[index] = draw(subset, top_k.clamp_min(0), values[:, 1], values[:, 2], wide)


def _pack(
    raw: torch.Tensor, tokens: torch.Tensor, finite: torch.Tensor, rows: list[RowParams], device: Device
) -> torch.Tensor:
    """Columns token, finite, logprob, then n best ids and their n log probabilities, if a row asks for them.

    One float tensor makes one copy; ids below 2**24 are exact even in float32.
    """
    count = len(rows)
    wide = device.wide_dtype
    asked = [index for index, row in enumerate(rows) if row.top_logprobs >= 0]
    # The number is fixed, so that ties are broken alike whoever is in the batch.
    width = min(MAX_TOP_LOGPROBS, raw.shape[1]) if any(row.top_logprobs > 0 for row in rows) else 0
    packed = torch.zeros((count, 3 + 2 * width), dtype=wide, device=raw.device)
    packed[:, 0] = tokens
    packed[:, 1] = finite
    if asked:
        index = device.to_device(torch.tensor(asked, dtype=torch.int64))
        logprobs = torch.log_softmax(raw.index_select(0, index), dim=-1)
        packed[index, 2] = logprobs.gather(1, tokens[index].unsqueeze(1)).squeeze(1).to(wide)
        if width:
            values, ids = logprobs.topk(width, dim=-1)
            packed[index, 3 : 3 + width] = ids.to(wide)
            packed[index, 3 + width :] = values.to(wide)
    return packed
