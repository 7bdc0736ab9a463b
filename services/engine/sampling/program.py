"""The computations that a step's sampling is made of, with their inputs. On the host.

Each computation has a few counts of its own, of rows, of drawn rows, of entries: what a step needs is put
together from them, so that the number of shapes is a sum and not a product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from services.engine.device import Device
from services.engine.domain import SamplingOptions
from services.engine.graphs import Phase
from services.engine.sampling.draw import CANDIDATES
from services.engine.sampling.inputs import (
    NO_TOKEN,
    MaskBuffer,
    TokenMasks,
    allowed_entries,
    banned_entries,
    biased_entries,
    no_entries,
    no_seen,
    seen_slices,
    uniforms,
)
from services.engine.sampling.rows import Floats, Int64s, RowParams, SequenceState

# Lengths that differ by less save little, for an entry costs almost nothing compared with the pass itself.
_WIDTHS: Final = (64, 512, 4096, 32768)
_LEAST_WIDTH: Final = 16
# Rows that are drawn, or whose log probabilities are wanted: more of them are done in slices of the largest
# count, for what is computed between holds several copies of their scores.
_DRAWN: Final = (1, 4, 16, 64)
# Rows with masks, which cost what is sent of them.
_MASKED: Final = (1, 8, 64)

Known = Mapping[str, bool]
_NOTHING: Final[Known] = {}
_UNRESTRICTED: Final[Known] = {"any_restricted": False}
_UNCONDITIONAL: Final[Known] = {"any_conditions": False}
_ALL_SEEN: Final[Known] = {"all_seen": True}

Tensors = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """Rising counts that computations come in: of rows, drawn rows, masked rows and entries of a list.

    exact: a new shape costs nothing, so the host's knowledge of a step narrows its computations. Otherwise
    all of them are captured or compiled beforehand, and each does the same for any step.
    """

    rows: tuple[int, ...]
    drawn: tuple[int, ...]
    masked: tuple[int, ...]
    entries: tuple[int, ...]
    exact: bool

    @classmethod
    def static(cls, rows: Sequence[int], vocab_size: int) -> Counts:
        """Return few counts, for devices on which each costs a compilation. `rows`: those of the head."""
        most = rows[-1]
        needed = 1 + sum(width < most * vocab_size for width in _WIDTHS)
        drawn = tuple(sorted({min(count, most) for count in _DRAWN}))
        masked = tuple(sorted({min(count, most) for count in _MASKED}))
        return cls(tuple(rows), drawn, masked, _WIDTHS[:needed], exact=False)

    @classmethod
    def powers(cls, rows: Sequence[int], vocab_size: int) -> Counts:
        """Return powers of two, and the largest of `rows`, those of the head, for what is counted in rows."""
        most = rows[-1]
        drawn = (*(1 << power for power in range((most - 1).bit_length())), most)
        last = max(_LEAST_WIDTH, most * vocab_size - 1).bit_length()
        entries = tuple(1 << power for power in range(_LEAST_WIDTH.bit_length() - 1, last + 1))
        return cls(tuple(rows), drawn, drawn, entries, exact=True)


@dataclass(frozen=True, slots=True)
class Call:
    """One computation: its static shape's name, and its inputs on the device.

    known: keyword arguments of the computation, facts about a step that narrow it; empty where counts are
    not exact.
    """

    phase: Phase
    key: int
    tensors: Tensors
    known: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingCalls:
    """The calls of a step's sampling in order. Between the two parts come those of masks, if it has any."""

    scores: Sequence[Call] = ()
    tokens: Sequence[Call] = ()

    @property
    def greedy(self) -> bool:
        """True if every row takes its best token, and nothing else is asked of it."""
        return len(self.tokens) == 1 and self.tokens[0].phase is Phase.GREEDY

    @property
    def draws(self) -> bool:
        """True if a row is drawn."""
        return any(call.phase in (Phase.DRAW, Phase.FILTER, Phase.FILTER_WIDE) for call in self.tokens)


class Program:
    """Make the calls of a step.

    beams: rows of beam searches may be among them. score_rows: prompt tokens that are scored at once, of as
    many as `score_places` in a step.
    """

    def __init__(
        self,
        device: Device,
        vocab_size: int,
        counts: Counts,
        score_rows: int,
        score_places: int,
        *,
        beams: bool = False,
    ) -> None:
        self._device = device
        self._wide = device.capabilities.wide_dtype
        self._vocab_size = vocab_size
        self._counts = counts
        self._exact = counts.exact
        # The row of the last tokens after those that may be sampled takes padding.
        self._rows = counts.rows[-1]
        self._padding = None if counts.exact else self._rows
        self._beam_phases = (Phase.NORMALIZE, Phase.BEAMS) if beams else ()
        self._score_rows = score_rows
        self._score_places = score_places

    @property
    def counts(self) -> dict[Phase, tuple[int, ...]]:
        """All static shapes, without exact counts."""
        counts = self._counts
        per_row = (Phase.HEAD, Phase.GREEDY, Phase.FINISH)
        per_drawn = (Phase.DRAW, Phase.FILTER, Phase.LOGPROBS)
        return {
            **dict.fromkeys(per_row, counts.rows),
            **dict.fromkeys(per_drawn, counts.drawn),
            **dict.fromkeys(self._beam_phases, counts.drawn),
            # So large a top_k is rare: one shape has to do.
            Phase.FILTER_WIDE: counts.drawn[-1:],
            Phase.MASK: counts.masked,
            Phase.EDIT: counts.entries,
            Phase.PENALIZE: counts.entries,
            Phase.PENDING: (1,),
            Phase.SCORE: (1, 2),
            Phase.RESULT: (1, 2),
        }

    def sampling(
        self, rows: list[RowParams], last_rows: Sequence[int], *, masked: bool = False
    ) -> SamplingCalls:
        """Make the calls for these rows, in the order of the hidden states; last_rows: their last tokens.

        `masked`: there will be masks. Raises ValueError for more rows than the largest count.
        """
        if len(rows) > self._rows:
            raise ValueError(f"{len(rows)} rows of parameters for {self._rows} rows of logits")
        count = _least(self._counts.rows, len(rows))
        if not masked and all(row.state.simple and not row.masked_ids for row in rows):
            return SamplingCalls(tokens=[self._greedy(last_rows, count)])
        restricted = [index for index, row in enumerate(rows) if row.state.allowed.size]
        beams = [index for index, row in enumerate(rows) if row.beam]
        drawn = [index for index, row in enumerate(rows) if not row.state.greedy]
        asked = [i for i, row in enumerate(rows) if row.state.options.top_logprobs >= 0 and not row.beam]
        edits = self._edits(rows, count)
        if not (masked or restricted or beams or drawn or asked or edits):
            return SamplingCalls(tokens=[self._greedy(last_rows, count)])
        scores = [self._head(restricted, count)]
        scores += [self._rows_alone(Phase.NORMALIZE, index) for index in self._slices(beams)]
        scores += edits
        calls = self._draws(rows, drawn, count)
        calls.append(self._finish(last_rows, drawn, count))
        calls += [self._rows_alone(Phase.BEAMS, index) for index in self._slices(beams)]
        known = {}
        if self._exact and asked:
            known = {"alternatives": any(row.state.options.top_logprobs > 0 for row in rows)}
        calls += [self._rows_alone(Phase.LOGPROBS, index, known) for index in self._slices(asked)]
        return SamplingCalls(scores, calls)

    def masks(self, masks: TokenMasks, buffer: MaskBuffer) -> list[Call]:
        """Make the calls that keep what these masks allow, which are sent from this buffer."""
        parts = self._slices(list(range(len(masks.rows))), self._counts.masked)
        return [self._mask(masks.take(index), buffer) for index in parts]

    def scores(
        self,
        picks: np.ndarray[Any, Any],
        targets: np.ndarray[Any, Any],
        turn: int,
        *,
        alternatives: bool = True,
    ) -> list[Call]:
        """Make the calls that score prompt tokens, int64 [N], after the hidden states `picks` of the prefill.

        turn: 1 or 2, for the steps that may be in flight. alternatives: False: none are asked for.
        """
        known = {} if alternatives or not self._exact else {"alternatives": False}
        starts = range(0, len(picks), self._score_rows)
        return [self._score(picks[start:], targets[start:], start, turn, known) for start in starts]

    def result(self, turn: int, harmless: torch.Tensor) -> Call:
        """Make the call that puts together what a step reports, of which the given buffer is a part."""
        return Call(Phase.RESULT, turn, (harmless,))

    def dummy(self, phase: Phase, key: int, harmless: torch.Tensor | None = None) -> Call:
        """Make a call of this shape on padding alone. harmless: as of `result`."""
        nothing = np.zeros(0, dtype=np.int64)
        row = RowParams(SequenceState(SamplingOptions(), [], 0), 0)
        spare, shared = self._rows, self._row_inputs([], self._rows)
        made: dict[Phase, Callable[[], Call]] = {
            Phase.HEAD: lambda: self._head([], key),
            Phase.GREEDY: lambda: self._greedy([], key),
            Phase.FINISH: lambda: self._finish([], [], key),
            Phase.EDIT: lambda: self._edit(*no_entries(key, spare), shared),
            Phase.PENALIZE: lambda: self._penalize(*no_seen(key, spare), shared),
            Phase.PENDING: lambda: Call(phase, key, shared),
            Phase.MASK: lambda: self._mask(self._no_masks(key), MaskBuffer(self._device)),
            Phase.DRAW: lambda: self._draw([row], [0] * key),
            Phase.FILTER: lambda: self._filter(phase, [row], [0] * key),
            Phase.FILTER_WIDE: lambda: self._filter(phase, [row], [0] * key),
            Phase.LOGPROBS: lambda: self._rows_alone(phase, [0] * key),
            Phase.NORMALIZE: lambda: self._rows_alone(phase, [0] * key),
            Phase.BEAMS: lambda: self._rows_alone(phase, [0] * key),
            Phase.SCORE: lambda: self._score(nothing, nothing, 0, key),
            Phase.RESULT: lambda: Call(phase, key, (harmless,)),
        }
        return made[phase]()

    def _edits(self, rows: list[RowParams], count: int) -> list[Call]:
        """Make the calls that change single logits: what is allowed first."""
        if not any(row.state.edited or row.masked_ids for row in rows):
            return []
        # Biases look up what was counted for penalties.
        entries, padding = self._counts.entries, self._padding
        seen = list(seen_slices(rows, entries, padding))
        lists = allowed_entries(rows), biased_entries(rows), banned_entries(rows, self._vocab_size)
        allowed, biased, banned = (list(one.slices(entries, padding)) for one in lists)
        waiting = any(row.state.penalized and row.pending_row is not None for row in rows)
        if not (allowed or seen or waiting or biased or banned):
            return []
        exact = self._exact
        penalties, pending = shared = self._row_inputs(rows, count if exact else self._rows)
        sure, last = shared, shared
        if exact:
            # Banned tokens need no penalties, and without those conditions alone ask for pending tokens.
            sure = penalties, pending if penalties is not None else None
            last = None, pending if any(row.state.phrases for row in rows) else None
        known, seen_known = (_UNCONDITIONAL, _ALL_SEEN) if exact else (_NOTHING, _NOTHING)
        calls = [self._edit(*one, sure, known) for one in allowed]
        if waiting:
            calls.append(Call(Phase.PENDING, 1, shared))
        calls += [self._penalize(*one, shared, seen_known) for one in seen]
        calls += [self._edit(*one, sure, known) for one in biased]
        return calls + [self._edit(*one, last) for one in banned]

    def _row_inputs(self, rows: list[RowParams], count: int) -> Tensors:
        """Send what edits know of rows: penalties float32 [3, count + 1], pending int64 [count + 1].

        With exact counts None: no row has any.
        """
        penalties = pending = None
        if not self._exact or any(row.state.penalized for row in rows):
            numbers = np.zeros((3, count + 1), dtype=np.float32)
            numbers[0] = 1.0
            given = [row.state.options for row in rows]
            numbers[0, : len(rows)] = [options.repetition_penalty for options in given]
            numbers[1, : len(rows)] = [options.frequency_penalty for options in given]
            numbers[2, : len(rows)] = [options.presence_penalty for options in given]
            penalties = self._send(numbers)
        if not self._exact or any(row.pending_row is not None for row in rows):
            waiting = np.full(count + 1, NO_TOKEN, dtype=np.int64)
            waiting[: len(rows)] = [NO_TOKEN if row.pending_row is None else row.pending_row for row in rows]
            pending = self._send(waiting)
        return penalties, pending

    def _head(self, restricted: list[int], count: int) -> Call:
        given = np.zeros(count, dtype=np.bool_)
        given[restricted] = True
        known = {} if restricted or not self._exact else _UNRESTRICTED
        return Call(Phase.HEAD, count, (self._send(given),), known)

    def _greedy(self, last_rows: Sequence[int], count: int) -> Call:
        return Call(Phase.GREEDY, count, (self._send(self._kept(last_rows, count)),))

    def _finish(self, last_rows: Sequence[int], drawn: list[int], count: int) -> Call:
        given = np.zeros((2, count), dtype=np.int64)
        given[0] = self._kept(last_rows, count)
        given[1, drawn] = 1
        return Call(Phase.FINISH, count, (self._send(given),))

    def _kept(self, last_rows: Sequence[int], count: int) -> Int64s:
        kept = np.full(count, self._rows, dtype=np.int64)
        kept[: len(last_rows)] = last_rows
        return kept

    def _edit(self, ints: Int64s, floats: Floats, shared: Tensors, known: Known = _NOTHING) -> Call:
        return Call(Phase.EDIT, ints.shape[1], (self._send(ints), self._send(floats), *shared), known)

    def _penalize(
        self, rows: Int64s, ids: Int64s, generated: Floats, shared: Tensors, known: Known = _NOTHING
    ) -> Call:
        sent = self._send(rows), self._send(ids), self._send(generated)
        return Call(Phase.PENALIZE, len(ids), (*sent, *shared), known)

    def _mask(self, masks: TokenMasks, buffer: MaskBuffer) -> Call:
        allowed = buffer.send(masks, self._vocab_size)
        return Call(Phase.MASK, len(masks.rows), (self._send(np.array(masks.rows)), allowed))

    def _no_masks(self, count: int) -> TokenMasks:
        bits = np.full((count, -(-self._vocab_size // 32)), -1, dtype=np.int32)
        return TokenMasks([self._rows] * count, bits)

    def _draws(self, rows: list[RowParams], drawn: list[int], count: int) -> list[Call]:
        filtered = [index for index in drawn if self._is_filtered(rows[index].state.options)]
        plain = sorted({*drawn}.difference(filtered)) if len(filtered) < len(drawn) else []
        wide: list[int] = []
        if not self._exact:
            # To find a threshold beyond the candidates takes as long as all else in the filters.
            wide = [i for i in filtered if CANDIDATES < rows[i].state.options.top_k < self._vocab_size]
        narrow = sorted({*filtered}.difference(wide)) if wide else filtered
        calls = [self._draw(rows, index, count) for index in self._slices(plain)]
        calls += [self._filter(Phase.FILTER, rows, index, count) for index in self._slices(narrow)]
        widest = self._counts.drawn[-1:]
        calls += [self._filter(Phase.FILTER_WIDE, rows, index) for index in self._slices(wide, widest)]
        return calls

    def _is_filtered(self, options: SamplingOptions) -> bool:
        """Return True if a filter may leave less than the whole vocabulary."""
        return options.top_p < 1 or options.min_p > 0 or 0 < options.top_k < self._vocab_size

    def _draw(self, rows: list[RowParams], index: list[int], count: int = 0) -> Call:
        floats = np.empty((2, len(index)))
        floats[0] = [rows[i].state.options.temperature for i in index]
        floats[1] = self._uniform(rows, index)
        known = {"every": True} if self._exact and index == list(range(count)) else {}
        return Call(Phase.DRAW, len(index), (self._send(np.array(index)), self._send_wide(floats)), known)

    def _filter(self, phase: Phase, rows: list[RowParams], index: list[int], count: int = 0) -> Call:
        options = [rows[i].state.options for i in index]
        top_k = [one.top_k if one.top_k < self._vocab_size else 0 for one in options]
        exact = [not one.keep_top_k_duplicates and k > 0 for one, k in zip(options, top_k, strict=True)]
        top_p = [one.top_p for one in options]
        floats = np.empty((4, len(index)))
        floats[0] = [one.temperature for one in options]
        floats[1] = self._uniform(rows, index)
        floats[2] = top_p
        floats[3] = [one.min_p for one in options]
        ints = np.array((index, top_k, exact), dtype=np.int64)
        known = {}
        if self._exact:
            known = {
                "every": index == list(range(count)),
                "any_top_k": any(top_k),
                "any_exact": any(exact),
                "any_top_p": min(top_p) < 1,
            }
        return Call(phase, len(index), (self._send(ints), self._send_wide(floats)), known)

    @staticmethod
    def _uniform(rows: list[RowParams], index: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return uniforms([rows[i].state.options.seed for i in index], [rows[i].position for i in index])

    def _rows_alone(self, phase: Phase, index: list[int], known: Mapping[str, bool] | None = None) -> Call:
        """Make a call that needs to know nothing but its rows."""
        return Call(phase, len(index), (self._send(np.array(index)),), known or {})

    def _score(
        self,
        picks: Int64s,
        targets: Int64s,
        start: int,
        turn: int,
        known: Mapping[str, bool] | None = None,
    ) -> Call:
        """Make a call that scores the first of these tokens, for the places from `start` on."""
        count = min(len(picks), self._score_rows)
        ints = np.zeros((3, self._score_rows), dtype=np.int64)
        ints[0, :count] = picks[:count]
        ints[1, :count] = targets[:count]
        # Beyond the last place there is one for padding.
        ints[2] = self._score_places
        ints[2, :count] = np.arange(start, start + count)
        return Call(Phase.SCORE, turn, (self._send(ints),), known or {})

    def _slices(self, index: list[int], counts: tuple[int, ...] | None = None) -> list[list[int]]:
        """Cut rows into static counts, those of drawn rows by default; the first of a slice fills it up."""
        counts = counts or self._counts.drawn
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
