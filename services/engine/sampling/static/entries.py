"""The single logits that a step changes, as lists of entries in a few static lengths. On the host.

A row and id are in a list once, but for bans. So slices of a list are independent, and a longer list is a
series of slices of the largest length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from services.engine.sampling.adjust import NO_TOKEN
from services.engine.sampling.rows import RowParams
from services.engine.sampling.state import Floats, Int64s

NOT_SEEN: Final = -1.0

# Lengths that differ by less save little, for an entry costs next to nothing beside the pass itself.
_WIDTHS: Final = (64, 512, 4096, 32768)

Slice = tuple[Int64s, Floats]
"""int64 [4, W]: rows, ids, conditions, 1 where allowed; float32 [2, W]: added, how often generated."""


def widths(cells: int) -> tuple[int, ...]:
    """The lengths that lists of up to `cells` entries come in."""
    needed = 1 + sum(width < cells for width in _WIDTHS)
    return _WIDTHS[:needed]


@dataclass(slots=True)
class Entries:
    """A list as parts of equal length: of ids with what is added to their logits, and how often each was
    generated, NOT_SEEN for what is not to be penalised.

    conditions: the entry holds if the row's pending token is this one; NO_TOKEN: always. `allow`: they lift
    the ban on all that is not allowed.
    """

    allow: bool = False
    _parts: list[tuple[int, Int64s, Floats, Floats, Int64s]] = field(default_factory=list)

    def add(
        self,
        row: int,
        ids: Int64s,
        *,
        added: Floats | float = 0.0,
        generated: Floats | float = NOT_SEEN,
        conditions: Int64s | int = NO_TOKEN,
    ) -> None:
        """Entries of one row; a number holds for all of them."""
        if ids.size:
            self._parts.append(
                (
                    row,
                    ids,
                    _whole(added, ids, np.float32),
                    _whole(generated, ids, np.float32),
                    _whole(conditions, ids, np.int64),
                )
            )

    def slices(self, lengths: tuple[int, ...], spare_row: int) -> Iterator[Slice]:
        """The list in slices of some of these rising lengths. Padding speaks of the spare row."""
        if not self._parts:
            return
        rows, ids, added, generated, conditions = zip(*self._parts, strict=True)
        total = sum(map(len, ids))
        ints = np.empty((4, total), dtype=np.int64)
        ints[0] = np.repeat(rows, [len(part) for part in ids])
        ints[1] = np.concatenate(ids)
        ints[2] = np.concatenate(conditions)
        ints[3] = self.allow
        floats = np.stack((np.concatenate(added), np.concatenate(generated)))
        for start, stop in _slices(total, lengths):
            padded, values = no_entries(stop - start, spare_row)
            count = min(stop, total) - start
            padded[:, :count] = ints[:, start:stop]
            values[:, :count] = floats[:, start:stop]
            yield padded, values


def no_entries(width: int, spare_row: int) -> Slice:
    """A slice of padding."""
    ints = np.zeros((4, width), dtype=np.int64)
    ints[0] = spare_row
    ints[2] = NO_TOKEN
    floats = np.zeros((2, width), dtype=np.float32)
    floats[1] = NOT_SEEN
    return ints, floats


def allowed_entries(rows: list[RowParams]) -> Entries:
    """The ids that some rows are restricted to."""
    entries = Entries(allow=True)
    for index, row in enumerate(rows):
        if row.state.allowed.size:
            entries.add(index, row.state.allowed)
    return entries


def biased_entries(rows: list[RowParams]) -> Entries:
    """Biases, with what `seen_slices` tells of the same tokens: they take the place of its entries."""
    entries = Entries()
    for index, row in enumerate(rows):
        state = row.state
        if not state.biases:
            continue
        ids, values = state.edit_ids[: state.biases], state.edit_values[: state.biases]
        generated: Floats | float = NOT_SEEN
        if state.counts is not None:
            generated = np.array([state.counts.generated(token) for token in ids.tolist()], dtype=np.float32)
        entries.add(index, ids, added=values, generated=generated)
    return entries


def seen_slices(
    rows: list[RowParams], lengths: tuple[int, ...], spare_row: int
) -> Iterator[tuple[Int64s, Int64s, Floats]]:
    """All tokens that penalised rows have seen, in slices: rows, ids int64 [W], how often generated [W].

    There may be hundreds for each row, so each is written once.
    """
    owners = [index for index, row in enumerate(rows) if row.state.counts is not None]
    parts = [state.counts.update() for row in rows if (state := row.state).counts is not None]
    total = sum(len(ids) for ids, _ in parts)
    if not total:
        return
    steps = list(_slices(total, lengths))
    owner, ids, generated = no_seen(steps[-1][1], spare_row)
    owner[:total] = np.repeat(owners, [len(part) for part, _ in parts])
    np.concatenate([part for part, _ in parts], out=ids[:total])
    np.concatenate([part for _, part in parts], out=generated[:total])
    for start, stop in steps:
        yield owner[start:stop], ids[start:stop], generated[start:stop]


def banned_entries(rows: list[RowParams], vocab_size: int) -> Entries:
    """What cannot be sampled, some of it after one certain token alone."""
    entries = Entries()
    for index, row in enumerate(rows):
        state = row.state
        if row.masked_ids:
            masked = np.array([token for token in row.masked_ids if token < vocab_size], dtype=np.int64)
            entries.add(index, masked, added=-np.inf)
        if len(state.edit_ids) > state.biases:
            entries.add(index, state.edit_ids[state.biases :], added=-np.inf)
        if state.phrases:
            found = np.array(state.completions(pending=row.pending_row is not None), dtype=np.int64)
            found = found.reshape(-1, 2)
            entries.add(index, found[:, 0], added=-np.inf, conditions=found[:, 1])
    return entries


def _whole(values: Any, ids: Int64s, dtype: type) -> np.ndarray[Any, Any]:
    return values if isinstance(values, np.ndarray) else np.full(len(ids), values, dtype)


def no_seen(width: int, spare_row: int) -> tuple[Int64s, Int64s, Floats]:
    """A slice of padding, as `seen_slices` gives them."""
    return (
        np.full(width, spare_row, dtype=np.int64),
        np.zeros(width, dtype=np.int64),
        np.full(width, NOT_SEEN, dtype=np.float32),
    )


def _slices(total: int, lengths: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Where slices of these rising lengths begin and end, the last of them beyond `total` entries."""
    for start in range(0, total, lengths[-1]):
        left = min(total - start, lengths[-1])
        yield start, start + next(length for length in lengths if length >= left)
