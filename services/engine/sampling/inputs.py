"""A step's lists of single logits, masks and random numbers, on the host.

A row and id are in a list once, but for bans. So slices of a list are independent, and a longer list is a
series of slices of the largest length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from services.engine.device import Device
from services.engine.sampling.rows import Floats, Int64s, RowParams

NO_TOKEN: Final = -1
NOT_SEEN: Final = -1.0

Slice = tuple[Int64s, Floats]
"""int64 [4, W]: rows, ids, conditions, 1 where allowed; float32 [2, W]: added, how often generated."""

Words = np.ndarray[Any, np.dtype[np.uint64]]

_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Tokens that may follow in rows of a step: in rows[m] those whose bit is set in bits[m].

    bits int32 [M, W], the lowest bit first, with W * 32 at least the width of the logits.
    """

    rows: list[int]
    bits: np.ndarray[Any, np.dtype[np.int32]]

    def take(self, index: list[int]) -> TokenMasks:
        """Return the masks at these indexes into `rows`, any of them several times."""
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
        """Make all of it free to be filled again."""
        self._used = 0

    def send(self, masks: TokenMasks, vocab_size: int) -> torch.Tensor:
        """Send one byte for each token, bool [M, vocab_size]: shifts of integers are slow on some devices."""
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


def uniforms(seeds: Iterable[int], positions: Iterable[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return `catenary.seeds.uniform` of each pair, which costs the host ten times as much row by row."""
    words = _mix(np.array([seed & _MASK for seed in seeds], dtype=np.uint64))
    words = _mix(words ^ np.fromiter(positions, dtype=np.uint64))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(words: Words) -> Words:
    """One splitmix64 step. Arrays of 64-bit words wrap around, as it wants."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@dataclass(slots=True)
class Entries:
    """A list as parts of one row each: of ids with what is added to their logits, and how often each was
    generated, NOT_SEEN for what is not to be penalised.

    conditions: the entry holds if the row's pending token is this one; NO_TOKEN: always. `allow`: they lift
    the ban on all that is not allowed.
    """

    allow: bool = False
    _parts: list[tuple[int, Int64s, Floats | float, Floats | float, Int64s | int]] = field(
        default_factory=list
    )

    def add(
        self,
        row: int,
        ids: Int64s,
        *,
        added: Floats | float = 0.0,
        generated: Floats | float = NOT_SEEN,
        conditions: Int64s | int = NO_TOKEN,
    ) -> None:
        """Append entries of one row; a number holds for all of them."""
        if ids.size:
            self._parts.append((row, ids, added, generated, conditions))

    def slices(self, lengths: tuple[int, ...], spare_row: int | None) -> Iterator[Slice]:
        """Cut the list into slices of some of these rising lengths.

        Padding is entries of the spare row; None: the list's first entry once more.
        """
        total = sum(len(part[1]) for part in self._parts)
        if not total:
            return
        steps = list(_slices(total, lengths))
        ints, floats = no_entries(steps[-1][1], spare_row or 0)
        rows, ids, added, generated, conditions = zip(*self._parts, strict=True)
        counts = [len(part) for part in ids]
        ints[0, :total] = np.repeat(rows, counts)
        np.concatenate(ids, out=ints[1, :total])
        ints[2, :total] = _spread(conditions, counts)
        ints[3, :total] = self.allow
        floats[0, :total] = _spread(added, counts)
        floats[1, :total] = _spread(generated, counts)
        if spare_row is None:
            ints[:, total:], floats[:, total:] = ints[:, :1], floats[:, :1]
        for start, stop in steps:
            yield ints[:, start:stop], floats[:, start:stop]


def no_entries(width: int, spare_row: int) -> Slice:
    """Return a slice of padding."""
    ints = np.zeros((4, width), dtype=np.int64)
    ints[0] = spare_row
    ints[2] = NO_TOKEN
    floats = np.zeros((2, width), dtype=np.float32)
    floats[1] = NOT_SEEN
    return ints, floats


def allowed_entries(rows: list[RowParams]) -> Entries:
    """List the ids that some rows are restricted to."""
    entries = Entries(allow=True)
    for index, row in enumerate(rows):
        if row.state.allowed.size:
            entries.add(index, row.state.allowed)
    return entries


def biased_entries(rows: list[RowParams]) -> Entries:
    """List biases, with the counts of `seen_slices` for the same tokens, whose entries they replace."""
    entries = Entries()
    for index, row in enumerate(rows):
        state = row.state
        if not state.bias_ids.size:
            continue
        generated: Floats | float = NOT_SEEN
        if (counts := state.counts) is not None:
            ids = state.bias_ids.tolist()
            generated = np.array([counts.generated(token) for token in ids], dtype=np.float32)
        entries.add(index, state.bias_ids, added=state.bias_values, generated=generated)
    return entries


def seen_slices(
    rows: list[RowParams], lengths: tuple[int, ...], spare_row: int | None
) -> Iterator[tuple[Int64s, Int64s, Floats]]:
    """Cut all tokens that penalised rows have seen into slices: rows, ids int64 [W], how often generated [W].

    There may be hundreds for each row, so each is written once. Padding as in `Entries.slices`.
    """
    owners = [index for index, row in enumerate(rows) if row.state.counts is not None]
    parts = [state.counts.update() for row in rows if (state := row.state).counts is not None]
    total = sum(len(ids) for ids, _ in parts)
    if not total:
        return
    steps = list(_slices(total, lengths))
    width = steps[-1][1]
    owner, ids = np.empty(width, dtype=np.int64), np.empty(width, dtype=np.int64)
    generated = np.empty(width, dtype=np.float32)
    owner[:total] = np.repeat(owners, [len(part) for part, _ in parts])
    np.concatenate([part for part, _ in parts], out=ids[:total])
    np.concatenate([part for _, part in parts], out=generated[:total])
    if spare_row is None:
        owner[total:], ids[total:], generated[total:] = owner[0], ids[0], generated[0]
    else:
        owner[total:], ids[total:], generated[total:] = no_seen(width - total, spare_row)
    for start, stop in steps:
        yield owner[start:stop], ids[start:stop], generated[start:stop]


def no_seen(width: int, spare_row: int) -> tuple[Int64s, Int64s, Floats]:
    """Return a slice of padding, in the form of `seen_slices`."""
    return (
        np.full(width, spare_row, dtype=np.int64),
        np.zeros(width, dtype=np.int64),
        np.full(width, NOT_SEEN, dtype=np.float32),
    )


def banned_entries(rows: list[RowParams], vocab_size: int) -> Entries:
    """List tokens that cannot be sampled, some of them after one certain token alone."""
    entries = Entries()
    for index, row in enumerate(rows):
        state = row.state
        if row.masked_ids:
            masked = np.array([token for token in row.masked_ids if token < vocab_size], dtype=np.int64)
            entries.add(index, masked, added=-np.inf)
        if state.banned_ids.size:
            entries.add(index, state.banned_ids, added=-np.inf)
        if state.phrases:
            found = np.array(state.completions(pending=row.pending_row is not None), dtype=np.int64)
            found = found.reshape(-1, 2)
            entries.add(index, found[:, 0], added=-np.inf, conditions=found[:, 1])
    return entries


def _spread(values: Sequence[Any], counts: list[int]) -> np.ndarray[Any, Any]:
    """Return arrays, or numbers as often as `counts` says, one after the other."""
    if not any(isinstance(one, np.ndarray) for one in values):
        return np.repeat(values, counts)
    parts = zip(values, counts, strict=True)
    return np.concatenate([v if isinstance(v, np.ndarray) else np.full(count, v) for v, count in parts])


def _slices(total: int, lengths: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield where slices of these rising lengths begin and end, the last of them beyond `total` entries."""
    for start in range(0, total, lengths[-1]):
        left = min(total - start, lengths[-1])
        yield start, start + next(length for length in lengths if length >= left)
