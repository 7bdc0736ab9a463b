"""A step's sampling parameters as tensors. Built on the host while the device is busy.

Shapes depend on the number R of padded rows and on powers of two alone. Lists are ragged, as (row, id, ...)
entries of all rows, so that their cost follows what there is; padding repeats the first entry in a way that
changes nothing. Which lists are there at all follows from the rows' options, never from values on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from services.engine.device import Device
from services.engine.sampling.rows import Floats, Int64s, RowParams


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """In row rows[m] of a step those tokens may follow whose bit is set in bits[m], the lowest bit first.

    bits int32 [M, W], with W * 32 at least the width of the logits.
    """

    rows: list[int]
    bits: np.ndarray[Any, np.dtype[np.int32]]

    def take(self, index: list[int]) -> TokenMasks:
        """Those of these indexes into `rows`, any of them several times."""
        if index == list(range(len(self.rows))):
            return self
        return TokenMasks([self.rows[i] for i in index], self.bits[index])


class MaskBuffer:
    """Host memory that masks are sent from, cleared when the device has no use any more for what was sent."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host = torch.empty(0, dtype=torch.bool)
        self._used = 0

    def clear(self) -> None:
        """From now on it may be filled again."""
        self._used = 0

    def send(self, masks: TokenMasks, vocab_size: int) -> torch.Tensor:
        """One byte for each token, bool [M, vocab_size]: shifts of integers are slow on some devices."""
        bits = masks.bits.view(np.uint8)
        flat = np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little").view(np.bool_)
        if self._used + flat.size > self._host.numel():
            # What was sent from the old one keeps it alive.
            self._host = self._device.memory.host_buffer(-(-2 * flat.size // 8)).view(torch.bool)
            self._used = 0
        part = self._host[self._used : self._used + flat.size].view(flat.shape)
        part.numpy()[:] = flat
        self._used += flat.size
        return self._device.memory.to_device(part)


Words = np.ndarray[Any, np.dtype[np.uint64]]

_MASK: Final = (1 << 64) - 1


def uniforms(seeds: Iterable[int], positions: Iterable[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """`catenary.seeds.uniform` of each pair, which costs the host ten times as much row by row."""
    words = _mix(np.array([seed & _MASK for seed in seeds], dtype=np.uint64))
    words = _mix(words ^ np.fromiter(positions, dtype=np.uint64))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(words: Words) -> Words:
    """One splitmix64 step. Arrays of 64-bit words wrap around, as it wants."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


_LEAST_ENTRIES: Final = 16


@dataclass(frozen=True, slots=True)
class Edits:
    """What is added to logits. rows, ids int64 [N]; values float32 [N], -inf for a ban.

    conditions int64 [N]: the entry holds if the row's pending token is this one; -1: always.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor
    conditions: torch.Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """Tokens that a row has seen. rows, ids int64 [N], no pair twice but for padding; generated float32 [N].

    repetition, frequency, presence float32 [R]; 1, 0 and 0 where a row has none.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    generated: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


@dataclass(frozen=True, slots=True)
class Allowed:
    """The only ids of some rows. rows, ids int64 [N]; restricted bool [R]."""

    rows: torch.Tensor
    ids: torch.Tensor
    restricted: torch.Tensor


@dataclass(frozen=True, slots=True)
class Masks:
    """What may follow in constrained rows. index int64 [M]; allowed bool [M, V]."""

    index: torch.Tensor
    allowed: torch.Tensor


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows that are drawn. index int64 [D]; temperature float32 [D]; uniform [D] in [0, 1), wide.

    `every`: they are all rows, in order.
    """

    every: bool
    index: torch.Tensor
    temperature: torch.Tensor
    uniform: torch.Tensor


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters of drawn rows: top_k int64 [D], 0 off; exact bool [D]; top_p, min_p [D] wide, 1 and 0 off."""

    top_k: torch.Tensor
    exact: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    any_top_k: bool
    any_exact: bool
    any_top_p: bool

    def select(self, index: torch.Tensor) -> Filters:
        """Those of the rows `index`, int64 [D]."""
        return Filters(
            top_k=self.top_k.index_select(0, index),
            exact=self.exact.index_select(0, index),
            top_p=self.top_p.index_select(0, index),
            min_p=self.min_p.index_select(0, index),
            any_top_k=self.any_top_k,
            any_exact=self.any_exact,
            any_top_p=self.any_top_p,
        )


@dataclass(frozen=True, slots=True)
class SamplerInputs:
    """Everything of a step but the logits. What is None is not needed by any row.

    pending_rows int64 [R] and is_pending bool [R] tell where a row's newest token waits. `asked` int64 [A]
    are the rows with log probabilities, with `alternatives` of them. `beams` int64 [B] are those of beams.
    """

    padded_rows: int
    edits: Edits | None = None
    penalties: Penalties | None = None
    allowed: Allowed | None = None
    masks: Masks | None = None
    plain: Draws | None = None
    filtered: tuple[Draws, Filters] | None = None
    pending_rows: torch.Tensor | None = None
    is_pending: torch.Tensor | None = None
    asked: torch.Tensor | None = None
    alternatives: bool = False
    beams: torch.Tensor | None = None

    @property
    def greedy(self) -> bool:
        """Whether every row takes its best token, and nothing else is asked of it."""
        edited = (self.edits, self.penalties, self.allowed, self.masks)
        return all(part is None for part in (*edited, self.plain, self.filtered, self.asked, self.beams))


def prepare(rows: list[RowParams], padded_rows: int, vocab_size: int, device: Device) -> SamplerInputs:
    """Inputs of a step with these rows in front of `padded_rows` rows of logits [padded_rows, vocab_size]."""
    if len(rows) > padded_rows:
        raise ValueError(f"{len(rows)} rows of parameters for {padded_rows} rows of logits")
    if all(row.state.simple and not row.masked_ids for row in rows):
        return SamplerInputs(padded_rows)
    edits = _edits(rows, vocab_size, device)
    penalties = _penalties(rows, padded_rows, device)
    drawn = [i for i, row in enumerate(rows) if not row.state.greedy]
    filtered = [i for i in drawn if rows[i].state.is_filtered(vocab_size)]
    plain = sorted({*drawn}.difference(filtered)) if len(filtered) < len(drawn) else []
    beams = [i for i, row in enumerate(rows) if row.beam]
    asked = [i for i, row in enumerate(rows) if row.state.options.top_logprobs >= 0]
    pending = [row.pending_row for row in rows] + [None] * (padded_rows - len(rows))
    waits = (edits is not None or penalties is not None) and any(row is not None for row in pending)
    return SamplerInputs(
        padded_rows=padded_rows,
        edits=edits,
        penalties=penalties,
        allowed=_allowed(rows, padded_rows, device),
        plain=_draws(rows, _padded(plain, padded_rows), padded_rows, device) if plain else None,
        filtered=_filtered(rows, filtered, padded_rows, vocab_size, device) if filtered else None,
        pending_rows=_ints(device, [row or 0 for row in pending]) if waits else None,
        is_pending=_send(device, np.array([row is not None for row in pending])) if waits else None,
        asked=_ints(device, _padded(asked, padded_rows)) if asked else None,
        alternatives=any(row.state.options.top_logprobs > 0 for row in rows),
        beams=_ints(device, _padded(beams, padded_rows)) if beams else None,
    )


def with_masks(
    inputs: SamplerInputs, masks: TokenMasks, vocab_size: int, device: Device, buffer: MaskBuffer
) -> SamplerInputs:
    """The inputs of a step whose masks are known now."""
    padded = masks.take(_padded(list(range(len(masks.rows))), inputs.padded_rows))
    found = Masks(_ints(device, padded.rows), buffer.send(padded, vocab_size))
    return replace(inputs, masks=found)


def _edits(rows: list[RowParams], vocab_size: int, device: Device) -> Edits | None:
    parts: list[tuple[int, Int64s, Floats]] = []
    conditional: list[tuple[int, int, int]] = []
    for index, row in enumerate(rows):
        state = row.state
        if row.masked_ids:
            masked = np.array([token for token in row.masked_ids if token < vocab_size], dtype=np.int64)
            parts.append((index, masked, np.full(len(masked), -np.inf, dtype=np.float32)))
        if state.edit_ids.size:
            parts.append((index, state.edit_ids, state.edit_values))
        if state.phrases:
            found = state.completions(pending=row.pending_row is not None)
            conditional += [(index, token, needed) for token, needed in found]
    certain = sum(len(ids) for _, ids, _ in parts)
    total = certain + len(conditional)
    if not total:
        return None
    missing = _width(total) - total
    last = np.array(conditional, dtype=np.int64).reshape(-1, 3)
    owners = np.repeat([index for index, _, _ in parts], [len(ids) for _, ids, _ in parts])
    values = np.zeros(total + missing, dtype=np.float32)
    values[:certain] = np.concatenate([part for _, _, part in parts]) if parts else 0.0
    values[certain:total] = -np.inf
    conditions = np.full(total + missing, -1, dtype=np.int64)
    conditions[certain:total] = last[:, 2]
    ids = np.concatenate((*[part for _, part, _ in parts], last[:, 1]))
    return Edits(
        rows=_send(device, _pad(np.concatenate((owners.astype(np.int64), last[:, 0])), missing)),
        ids=_send(device, _pad(ids, missing)),
        values=_send(device, values),
        conditions=_send(device, conditions),
    )


def _penalties(rows: list[RowParams], padded_rows: int, device: Device) -> Penalties | None:
    owners = [index for index, row in enumerate(rows) if row.state.penalized]
    if not owners:
        return None
    columns = np.zeros((3, padded_rows), dtype=np.float32)
    columns[0] = 1.0
    options = [row.state.options for row in rows]
    columns[0, : len(rows)] = [one.repetition_penalty for one in options]
    columns[1, : len(rows)] = [one.frequency_penalty for one in options]
    columns[2, : len(rows)] = [one.presence_penalty for one in options]
    parts = [counts.update() for row in rows if (counts := row.state.counts) is not None]
    lengths = [len(ids) for ids, _ in parts]
    width = _width(sum(lengths))
    repetition, frequency, presence = _send(device, columns)
    return Penalties(
        rows=_send(device, _filled([np.repeat(owners, lengths)], width)),
        ids=_send(device, _filled([ids for ids, _ in parts], width)),
        generated=_send(device, _filled([counts for _, counts in parts], width)),
        repetition=repetition,
        frequency=frequency,
        presence=presence,
    )


def _allowed(rows: list[RowParams], padded_rows: int, device: Device) -> Allowed | None:
    owners = [index for index, row in enumerate(rows) if row.state.allowed.size]
    if not owners:
        return None
    parts = [rows[index].state.allowed for index in owners]
    missing = _width(sum(map(len, parts))) - sum(map(len, parts))
    restricted = np.zeros(padded_rows, dtype=np.bool_)
    restricted[owners] = True
    return Allowed(
        rows=_send(device, _pad(np.repeat(owners, [len(ids) for ids in parts]), missing)),
        ids=_send(device, _pad(np.concatenate(parts), missing)),
        restricted=_send(device, restricted),
    )


def _draws(rows: list[RowParams], index: list[int], padded_rows: int, device: Device) -> Draws:
    numbers = uniforms([rows[i].state.options.seed for i in index], [rows[i].position for i in index])
    return Draws(
        every=index == list(range(padded_rows)),
        index=_ints(device, index),
        temperature=_floats(device, [rows[i].state.options.temperature for i in index], torch.float32),
        uniform=device.memory.to_device(torch.from_numpy(numbers).to(device.capabilities.wide_dtype)),
    )


def _filtered(
    rows: list[RowParams], chosen: list[int], padded_rows: int, vocab_size: int, device: Device
) -> tuple[Draws, Filters]:
    index = _padded(chosen, padded_rows)
    options = [rows[i].state.options for i in index]
    top_k = [one.top_k if one.top_k < vocab_size else 0 for one in options]
    exact = [not one.keep_top_k_duplicates and k > 0 for one, k in zip(options, top_k, strict=True)]
    filters = Filters(
        top_k=_ints(device, top_k),
        exact=_send(device, np.array(exact)),
        top_p=_floats(device, [one.top_p for one in options], device.capabilities.wide_dtype),
        min_p=_floats(device, [one.min_p for one in options], device.capabilities.wide_dtype),
        any_top_k=any(top_k),
        any_exact=any(exact),
        any_top_p=any(one.top_p < 1 for one in options),
    )
    return _draws(rows, index, padded_rows, device), filters


def _padded(index: list[int], padded_rows: int) -> list[int]:
    """The rows, the first of them repeated up to a power of two or the number of padded rows."""
    return index + index[:1] * (min(_power(len(index)), padded_rows) - len(index))


def _power(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def _width(count: int) -> int:
    return max(_LEAST_ENTRIES, _power(count))


def _filled(parts: list[np.ndarray[Any, Any]], width: int) -> np.ndarray[Any, Any]:
    """The parts one after the other, then the first entry as often as it takes; each is written once."""
    total = sum(map(len, parts))
    values: np.ndarray[Any, Any] = np.empty(width, dtype=parts[0].dtype)
    np.concatenate(parts, out=values[:total])
    values[total:] = values[0]
    return values


def _pad(values: np.ndarray[Any, Any], missing: int) -> np.ndarray[Any, Any]:
    return np.concatenate((values, np.broadcast_to(values[:1], (missing,))))


# torch takes several times as long as numpy to read a list.
def _ints(device: Device, values: list[int]) -> torch.Tensor:
    return _send(device, np.array(values, dtype=np.int64))


def _floats(device: Device, values: list[float], dtype: torch.dtype) -> torch.Tensor:
    return device.memory.to_device(torch.from_numpy(np.array(values)).to(dtype))


def _send(device: Device, values: np.ndarray[Any, Any]) -> torch.Tensor:
    return device.memory.to_device(torch.from_numpy(np.ascontiguousarray(values)))
