"""The static computations that a step's sampling is made of, with their inputs. On the host.

A row and id are in a list once, but for bans. So slices of a list are independent, and a longer list is a
series of slices of the largest length.

Each computation has a few counts of its own, of rows, of drawn rows, of entries: what a step needs is put
together from them, so that the number of shapes is a sum and not a product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from services.engine.device import Device
from services.engine.domain import SamplingOptions
from services.engine.graphs import Phase
from services.engine.sampling.draw import CANDIDATES
from services.engine.sampling.inputs import MaskBuffer, TokenMasks, uniforms
from services.engine.sampling.rows import Floats, Int64s, RowParams, SequenceState
from services.engine.sampling.sampler import NO_TOKEN

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


Tensors = tuple[torch.Tensor, ...]

# Rows that are drawn, or whose log probabilities are wanted: more of them are done in slices of the largest
# count, for what is computed between holds several copies of their scores.
_DRAWN: Final = (1, 4, 16, 64)
# Rows with masks, which cost what is sent of them.
_MASKED: Final = (1, 8, 64)


@dataclass(frozen=True, slots=True)
class Call:
    """One computation: its static shape's name, and its inputs on the device."""

    phase: Phase
    key: int
    tensors: Tensors


@dataclass(frozen=True, slots=True)
class SamplingCalls:
    """The calls of a step's sampling in order. Between the two parts come those of masks, if it has any."""

    scores: Sequence[Call] = ()
    tokens: Sequence[Call] = ()


class StaticProgram:
    """Makes the calls for the rising numbers of rows `row_counts`.

    beams: rows of beam searches may be among them. score_rows: prompt tokens that are scored at once, of as
    many as `score_places` in a step. `turn` is 1 or 2, for the steps that may be in flight.
    """

    def __init__(
        self,
        device: Device,
        vocab_size: int,
        row_counts: Sequence[int],
        score_rows: int,
        score_places: int,
        *,
        beams: bool = False,
    ) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._row_counts = tuple(row_counts)
        self._spare = max_rows = self._row_counts[-1]
        self._drawn = tuple(sorted({min(count, max_rows) for count in _DRAWN}))
        self._masked = tuple(sorted({min(count, max_rows) for count in _MASKED}))
        self._widths = widths(max_rows * vocab_size)
        self._beam_phases = (Phase.NORMALIZE, Phase.BEAMS) if beams else ()
        self._score_rows = score_rows
        self._score_places = score_places

    @property
    def counts(self) -> dict[Phase, tuple[int, ...]]:
        """All static shapes."""
        per_row = (Phase.HEAD, Phase.GREEDY, Phase.FINISH)
        per_drawn = (Phase.DRAW, Phase.FILTER, Phase.LOGPROBS)
        return {
            **dict.fromkeys(per_row, self._row_counts),
            **dict.fromkeys(per_drawn, self._drawn),
            **dict.fromkeys(self._beam_phases, self._drawn),
            # Hardly anybody wants that many: one shape has to do.
            Phase.FILTER_WIDE: self._drawn[-1:],
            Phase.MASK: self._masked,
            Phase.EDIT: self._widths,
            Phase.PENALIZE: self._widths,
            Phase.PENDING: (1,),
            Phase.SCORE: (1, 2),
            Phase.RESULT: (1, 2),
        }

    def sampling(
        self, rows: list[RowParams], last_rows: Sequence[int], *, masked: bool = False
    ) -> SamplingCalls:
        """The calls for these rows, in the order of the hidden states; last_rows: their last tokens.

        `masked`: there will be masks.
        """
        count = _least(self._row_counts, len(rows))
        if not masked and all(row.state.simple and not row.masked_ids for row in rows):
            return SamplingCalls(tokens=[self._greedy(last_rows, count)])
        restricted = [index for index, row in enumerate(rows) if row.state.allowed.size]
        beams = [index for index, row in enumerate(rows) if row.beam]
        scores = [self._head(restricted, count)]
        scores += [self._rows_alone(Phase.NORMALIZE, index) for index in self._slices(beams)]
        scores += self._edits(rows)
        drawn = [index for index, row in enumerate(rows) if not row.state.greedy]
        filtered = [index for index in drawn if rows[index].state.is_filtered(self._vocab_size)]
        plain = sorted({*drawn}.difference(filtered))
        # To find a threshold beyond the candidates takes as long as all else in the filters.
        wide = [i for i in filtered if CANDIDATES < rows[i].state.options.top_k < self._vocab_size]
        narrow = sorted({*filtered}.difference(wide)) if wide else filtered
        calls = [self._draw(rows, index) for index in self._slices(plain)]
        calls += [self._filter(Phase.FILTER, rows, index) for index in self._slices(narrow)]
        calls += [
            self._filter(Phase.FILTER_WIDE, rows, index) for index in self._slices(wide, self._drawn[-1:])
        ]
        calls.append(self._finish(last_rows, drawn, count))
        calls += [self._rows_alone(Phase.BEAMS, index) for index in self._slices(beams)]
        asked = [i for i, row in enumerate(rows) if row.state.options.top_logprobs >= 0 and not row.beam]
        calls += [self._rows_alone(Phase.LOGPROBS, index) for index in self._slices(asked)]
        return SamplingCalls(scores, calls)

    def masks(self, masks: TokenMasks, buffer: MaskBuffer) -> list[Call]:
        """The calls that keep what these masks allow, which are sent from this buffer."""
        parts = self._slices(list(range(len(masks.rows))), self._masked)
        return [self._mask(masks.take(index), buffer) for index in parts]

    def scores(self, picks: np.ndarray[Any, Any], targets: np.ndarray[Any, Any], turn: int) -> list[Call]:
        """The calls that score prompt tokens, int64 [N], after the hidden states `picks` of the prefill."""
        starts = range(0, len(picks), self._score_rows)
        return [self._score(picks[start:], targets[start:], start, turn) for start in starts]

    def result(self, turn: int, harmless: torch.Tensor) -> Call:
        """The call that puts together what a step reports, of which the given buffer is a part."""
        return Call(Phase.RESULT, turn, (harmless,))

    def dummy(self, phase: Phase, key: int, harmless: torch.Tensor) -> Call:
        """A call of this shape on padding alone."""
        nothing = np.zeros(0, dtype=np.int64)
        row = RowParams(SequenceState(SamplingOptions(), [], 0), 0)
        made: dict[Phase, Callable[[], Call]] = {
            Phase.HEAD: lambda: self._head([], key),
            Phase.GREEDY: lambda: self._greedy([], key),
            Phase.FINISH: lambda: self._finish([], [], key),
            Phase.EDIT: lambda: self._edit(*no_entries(key, self._spare), self._row_inputs([])),
            Phase.PENALIZE: lambda: self._penalize(*no_seen(key, self._spare), self._row_inputs([])),
            Phase.PENDING: lambda: Call(phase, key, self._row_inputs([])),
            Phase.MASK: lambda: self._mask(self._no_masks(key), MaskBuffer(self._device)),
            Phase.DRAW: lambda: self._draw([row], [0] * key),
            Phase.FILTER: lambda: self._filter(phase, [row], [0] * key),
            Phase.FILTER_WIDE: lambda: self._filter(phase, [row], [0] * key),
            Phase.LOGPROBS: lambda: self._rows_alone(phase, [0] * key),
            Phase.NORMALIZE: lambda: self._rows_alone(phase, [0] * key),
            Phase.BEAMS: lambda: self._rows_alone(phase, [0] * key),
            Phase.SCORE: lambda: self._score(nothing, nothing, 0, key),
            Phase.RESULT: lambda: self.result(key, harmless),
        }
        return made[phase]()

    def _edits(self, rows: list[RowParams]) -> list[Call]:
        """The calls that change single logits: what is allowed first."""
        # Biases look up what was counted for penalties.
        seen = list(seen_slices(rows, self._widths, self._spare))
        lists = allowed_entries(rows), biased_entries(rows), banned_entries(rows, self._vocab_size)
        allowed, biased, banned = (list(one.slices(self._widths, self._spare)) for one in lists)
        waiting = any(row.state.penalized and row.pending_row is not None for row in rows)
        if not (allowed or seen or waiting or biased or banned):
            return []
        shared = self._row_inputs(rows)
        calls = [self._edit(*one, shared) for one in allowed]
        if waiting:
            calls.append(Call(Phase.PENDING, 1, shared))
        calls += [self._penalize(*one, shared) for one in seen]
        return calls + [self._edit(*one, shared) for one in (*biased, *banned)]

    def _row_inputs(self, rows: list[RowParams]) -> Tensors:
        """What edits know of rows, the spare one included: penalties float32 [3, S], pending int64 [S]."""
        penalties = np.zeros((3, self._spare + 1), dtype=np.float32)
        penalties[0] = 1.0
        pending = np.full(self._spare + 1, NO_TOKEN, dtype=np.int64)
        given = [row.state.options for row in rows]
        penalties[0, : len(rows)] = [options.repetition_penalty for options in given]
        penalties[1, : len(rows)] = [options.frequency_penalty for options in given]
        penalties[2, : len(rows)] = [options.presence_penalty for options in given]
        pending[: len(rows)] = [NO_TOKEN if row.pending_row is None else row.pending_row for row in rows]
        return self._send(penalties), self._send(pending)

    def _head(self, restricted: list[int], count: int) -> Call:
        given = np.zeros(count, dtype=np.bool_)
        given[restricted] = True
        return Call(Phase.HEAD, count, (self._send(given),))

    def _greedy(self, last_rows: Sequence[int], count: int) -> Call:
        return Call(Phase.GREEDY, count, (self._send(self._kept(last_rows, count)),))

    def _finish(self, last_rows: Sequence[int], drawn: list[int], count: int) -> Call:
        given = np.zeros((2, count), dtype=np.int64)
        given[0] = self._kept(last_rows, count)
        given[1, drawn] = 1
        return Call(Phase.FINISH, count, (self._send(given),))

    def _kept(self, last_rows: Sequence[int], count: int) -> Int64s:
        kept = np.full(count, self._spare, dtype=np.int64)
        kept[: len(last_rows)] = last_rows
        return kept

    def _edit(self, ints: Int64s, floats: Floats, shared: Tensors) -> Call:
        return Call(Phase.EDIT, ints.shape[1], (self._send(ints), self._send(floats), *shared))

    def _penalize(self, rows: Int64s, ids: Int64s, generated: Floats, shared: Tensors) -> Call:
        sent = self._send(rows), self._send(ids), self._send(generated)
        return Call(Phase.PENALIZE, len(ids), (*sent, *shared))

    def _mask(self, masks: TokenMasks, buffer: MaskBuffer) -> Call:
        allowed = buffer.send(masks, self._vocab_size)
        return Call(Phase.MASK, len(masks.rows), (self._send(np.array(masks.rows)), allowed))

    def _no_masks(self, count: int) -> TokenMasks:
        bits = np.full((count, -(-self._vocab_size // 32)), -1, dtype=np.int32)
        return TokenMasks([self._spare] * count, bits)

    def _draw(self, rows: list[RowParams], index: list[int]) -> Call:
        options = [rows[i].state.options for i in index]
        floats = np.stack(([one.temperature for one in options], self._uniform(rows, index)))
        return Call(Phase.DRAW, len(index), (self._send(np.array(index)), self._send_wide(floats)))

    def _filter(self, phase: Phase, rows: list[RowParams], index: list[int]) -> Call:
        options = [rows[i].state.options for i in index]
        top_k = [one.top_k if one.top_k < self._vocab_size else 0 for one in options]
        exact = [not one.keep_top_k_duplicates and k > 0 for one, k in zip(options, top_k, strict=True)]
        floats = np.stack(
            (
                [one.temperature for one in options],
                self._uniform(rows, index),
                [one.top_p for one in options],
                [one.min_p for one in options],
            )
        )
        ints = np.array((index, top_k, exact), dtype=np.int64)
        return Call(phase, len(index), (self._send(ints), self._send_wide(floats)))

    @staticmethod
    def _uniform(rows: list[RowParams], index: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return uniforms([rows[i].state.options.seed for i in index], [rows[i].position for i in index])

    def _rows_alone(self, phase: Phase, index: list[int]) -> Call:
        """A call that needs to know nothing but its rows."""
        return Call(phase, len(index), (self._send(np.array(index)),))

    def _score(self, picks: Int64s, targets: Int64s, start: int, turn: int) -> Call:
        """Scores the first of these tokens; what they get goes to the places from `start` on."""
        count = min(len(picks), self._score_rows)
        ints = np.zeros((3, self._score_rows), dtype=np.int64)
        ints[0, :count] = picks[:count]
        ints[1, :count] = targets[:count]
        # Beyond the last place there is one for padding.
        ints[2] = self._score_places
        ints[2, :count] = np.arange(start, start + count)
        return Call(Phase.SCORE, turn, (self._send(ints),))

    def _slices(self, index: list[int], counts: tuple[int, ...] | None = None) -> list[list[int]]:
        """The rows in static counts, those of drawn rows by default; the first of a slice fills it up."""
        counts = counts or self._drawn
        parts = [index[start : start + counts[-1]] for start in range(0, len(index), counts[-1])]
        return [part + part[:1] * (_least(counts, len(part)) - len(part)) for part in parts]

    def _send(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return self._device.memory.to_device(torch.from_numpy(values))

    def _send_wide(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return self._device.memory.to_device(
            torch.from_numpy(values).to(self._device.capabilities.wide_dtype)
        )


def _least(counts: tuple[int, ...], needed: int) -> int:
    return next(count for count in counts if count >= needed)
