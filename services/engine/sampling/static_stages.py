"""A step's computations outside its forwards, each of a static shape: in, out and between are buffers.

Each may run twice in a row with the same inputs, as a capture does, and the second time changes nothing. What
varies from step to step comes in as tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final

import torch

from catenary.sequence_limits import MAX_TOP_LOGPROBS
from services.engine.device import Device, Forward
from services.engine.graphs import Phase
from services.engine.sampling.draw import (
    ComparingSearch,
    candidates,
    draw_candidates,
    draw_wide,
    first_argmax,
    invert,
)
from services.engine.sampling.inputs import Filters
from services.engine.sampling.rows import PACKED_HEAD, RowStatus
from services.engine.sampling.sampler import NO_TOKEN, beam_columns, logprob_columns, penalized
from services.engine.sampling.static_program import NOT_SEEN


@dataclass(frozen=True, slots=True)
class StaticSizes:
    """Most rows that are sampled, most rows and tokens of a prefill, most prompt tokens scored at once."""

    rows: int
    prefill_rows: int
    prefill_tokens: int
    slice_rows: int


@dataclass(frozen=True, slots=True)
class StaticBuffers:
    """Tensors that live as long as the engine. The last of S = rows + 1 rows takes what belongs to nobody.

    raw, scores float32 [S, V]: logits before and after edits. tokens int64 [S]: drawn, then sampled ones.
    head [S, 2]: token and status; columns [S, 1 + 2 * n]: log probabilities; harmless [prefill rows]: whether
    a prefill's row went well; these and what follows are of the device's widest float. results: all of them
    in one row, once for each of the steps that may be in flight, and so prompts [tokens + 1, 1 + 2 * n].
    chunk [prefill tokens, hidden_size]: hidden states of the last prefill.
    """

    raw: torch.Tensor
    scores: torch.Tensor
    tokens: torch.Tensor
    head: torch.Tensor
    columns: torch.Tensor
    harmless: torch.Tensor
    chunk: torch.Tensor
    results: tuple[torch.Tensor, torch.Tensor]
    prompts: tuple[torch.Tensor, torch.Tensor]

    @property
    def bytes(self) -> int:
        """What they take of the device's memory."""
        total = 0
        for one in fields(self):
            value = getattr(self, one.name)
            total += sum(tensor.nbytes for tensor in (value if isinstance(value, tuple) else (value,)))
        return total

    def unpack(self, host: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of one of `results` on the host: `harmless`, and packed samples [S, 3 + 2 * n]."""
        harmless = self.harmless.shape[0]
        return host[:harmless], host[harmless:].view(self.raw.shape[0], -1)


def allocate(
    device: Device, sizes: StaticSizes, vocab_size: int, hidden_size: int, dtype: torch.dtype
) -> StaticBuffers:
    """Zeroed buffers for a model whose hidden states are of `dtype`."""
    rows, wide = sizes.rows + 1, device.capabilities.wide_dtype
    width = PACKED_HEAD + 2 * min(MAX_TOP_LOGPROBS, vocab_size)
    slices = -(-sizes.prefill_tokens // sizes.slice_rows)

    def twice(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        return device.memory.zeros(shape, wide), device.memory.zeros(shape, wide)

    return StaticBuffers(
        raw=device.memory.zeros((rows, vocab_size), torch.float32),
        scores=device.memory.zeros((rows, vocab_size), torch.float32),
        tokens=device.memory.zeros((rows,), torch.int64),
        head=device.memory.zeros((rows, PACKED_HEAD - 1), wide),
        columns=device.memory.zeros((rows, width - PACKED_HEAD + 1), wide),
        harmless=device.memory.zeros((sizes.prefill_rows,), wide),
        chunk=device.memory.zeros((sizes.prefill_tokens, hidden_size), dtype),
        results=twice((sizes.prefill_rows + rows * width,)),
        prompts=twice((slices * sizes.slice_rows + 1, width - PACKED_HEAD + 1)),
    )


# Log probabilities in float32 add up to 1 as near as that.
_ROUNDING: Final = 4e-6

Head = Callable[[torch.Tensor], torch.Tensor]


class Stages:
    """`head` gives logits; hidden [S, hidden_size] and last_tokens int64 [S] are the runner's."""

    def __init__(
        self,
        head: Head,
        hidden: torch.Tensor,
        last_tokens: torch.Tensor,
        buffers: StaticBuffers,
        device: Device,
    ) -> None:
        self._head = head
        self._hidden = hidden
        self._last_tokens = last_tokens
        self._buffers = buffers
        self._device = device
        self._search = ComparingSearch()
        forwards: dict[Phase, tuple[Forward, ...]] = {
            Phase.HEAD: (self.head,),
            Phase.NORMALIZE: (self.normalize,),
            Phase.EDIT: (self.edit,),
            Phase.PENDING: (self.pending,),
            Phase.PENALIZE: (self.penalize,),
            Phase.MASK: (self.mask,),
            Phase.DRAW: (self.draw,),
            Phase.FILTER: (self.filter,),
            Phase.FILTER_WIDE: (self.filter_wide,),
            Phase.FINISH: (self.finish,),
            Phase.GREEDY: (self.greedy,),
            Phase.LOGPROBS: (self.logprobs,),
            Phase.BEAMS: (self.beams,),
            Phase.SCORE: (self.score(0), self.score(1)),
            Phase.RESULT: (self.result(0), self.result(1)),
        }
        self._forwards = {
            phase: tuple(map(device.execution.compile, some)) for phase, some in forwards.items()
        }

    def forward(self, phase: Phase, key: int) -> Forward:
        """The function of a static shape. `key` counts what it is for from 1, or tells the shape alone."""
        forwards = self._forwards[phase]
        return forwards[key - 1] if len(forwards) > 1 else forwards[0]

    def head(self, restricted: torch.Tensor) -> None:
        """restricted bool [R]: rows of which nothing is allowed yet. Scores the first R hidden states."""
        rows = self._rows(restricted.shape[0])
        logits = self._head(self._hidden[: restricted.shape[0]]).float()
        self._buffers.raw.index_copy_(0, rows, logits)
        self._buffers.scores.index_copy_(0, rows, logits.masked_fill(restricted.unsqueeze(1), -torch.inf))

    def normalize(self, index: torch.Tensor) -> None:
        """Makes the logits of these rows, int64 [D], log probabilities. Before they are edited."""
        raw = self._buffers.raw.index_select(0, index)
        total = raw.logsumexp(-1, keepdim=True)
        # What is normal already stays as it is, to the last bit.
        normal = raw - total.masked_fill(total.abs() < _ROUNDING, 0.0)
        banned = self._buffers.scores.index_select(0, index) == -torch.inf
        self._buffers.raw.index_copy_(0, index, normal)
        self._buffers.scores.index_copy_(0, index, normal.masked_fill(banned, -torch.inf))

    def edit(
        self, ints: torch.Tensor, floats: torch.Tensor, penalties: torch.Tensor, pending_rows: torch.Tensor
    ) -> None:
        """A slice of entries as `Entries` gives them; penalties, pending_rows as of `pending`.

        What is banned already stays so, but for what is allowed, which therefore comes first.
        """
        rows, ids, conditions, allow = ints
        added, generated = floats
        pending = self._pending(pending_rows).index_select(0, rows)
        values = self._of(self._buffers.raw, rows, ids) + added
        values = self._penalized(values, rows, generated, ids == pending, penalties)
        before = self._of(self._buffers.scores, rows, ids)
        values = values.masked_fill((before == -torch.inf) & (allow == 0), -torch.inf)
        holds = (conditions == NO_TOKEN) | (conditions == pending)
        self._buffers.scores.index_put_((rows.masked_fill(~holds, self._spare), ids), values)

    def penalize(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        generated: torch.Tensor,
        penalties: torch.Tensor,
        pending_rows: torch.Tensor,
    ) -> None:
        """A slice as `seen_slices` gives it; penalties, pending_rows as of `pending`."""
        repeated = ids == self._pending(pending_rows).index_select(0, rows)
        values = self._of(self._buffers.raw, rows, ids)
        values = self._penalized(values, rows, generated, repeated, penalties)
        before = self._of(self._buffers.scores, rows, ids)
        values = values.masked_fill(before == -torch.inf, -torch.inf)
        self._buffers.scores.index_put_((rows, ids), values)

    def pending(self, penalties: torch.Tensor, pending_rows: torch.Tensor) -> None:
        """Penalises the tokens that wait on the device as if each were new; `penalize` knows better if not.

        penalties float32 [3, S]: repetition, frequency and presence, 1, 0 and 0 where there is none.
        pending_rows int64 [S]: which of the last tokens is a row's newest, NO_TOKEN if the host knows it.
        """
        pending = self._pending(pending_rows)
        rows = self._rows(pending.shape[0])
        ids = pending.clamp_min(0)
        values = self._of(self._buffers.raw, rows, ids)
        values = penalized(values, torch.ones_like(values), *penalties)
        before = self._of(self._buffers.scores, rows, ids)
        values = values.masked_fill(before == -torch.inf, -torch.inf)
        self._buffers.scores.index_put_((rows.masked_fill(pending < 0, self._spare), ids), values)

    def mask(self, index: torch.Tensor, allowed: torch.Tensor) -> None:
        """index int64 [M]: rows; allowed bool [M, V]: the tokens that stay as they are, all others banned."""
        scores = self._buffers.scores.index_select(0, index)
        self._buffers.scores.index_copy_(0, index, scores.masked_fill(~allowed, -torch.inf))

    def draw(self, index: torch.Tensor, floats: torch.Tensor) -> None:
        """index int64 [D]: rows; floats [2, D], wide: temperature, uniform. Draws from all tokens."""
        temperature, uniform = floats
        scaled = self._scaled(index, temperature)
        drawn = invert(scaled.exp_(), uniform, self._device.capabilities.wide_dtype, self._search)
        self._buffers.tokens.index_copy_(0, index, drawn)

    def filter(self, ints: torch.Tensor, floats: torch.Tensor) -> None:
        """ints [3, D]: rows, top_k up to CANDIDATES, exact; floats [4, D], wide: temperature, uniform, top_p,
        min_p.
        """
        self._filter(ints, floats, known=True)

    def filter_wide(self, ints: torch.Tensor, floats: torch.Tensor) -> None:
        """The same for any top_k."""
        self._filter(ints, floats, known=False)

    def _filter(self, ints: torch.Tensor, floats: torch.Tensor, *, known: bool) -> None:
        """`known`: the candidates tell the score of each row's top_k-th best."""
        index, top_k, exact = ints
        temperature, uniform, top_p, min_p = floats
        filters = Filters(top_k, exact == 1, top_p, min_p, any_top_k=True, any_exact=True, any_top_p=True)
        scaled = self._scaled(index, temperature)
        wide = self._device.capabilities.wide_dtype
        # To ask which rows the candidates do not suffice for would be to wait: all are drawn both ways.
        best = candidates(scaled)
        tokens, sufficient = draw_candidates(scaled.clone(), best, uniform, filters, wide, self._search)
        place = (top_k - 1).clamp(0, best[0].shape[1] - 1).unsqueeze(1)
        kth = best[0].gather(1, place).squeeze(1) if known else None
        others = draw_wide(scaled, filters, uniform, wide, self._search, kth=kth)
        self._buffers.tokens.index_copy_(0, index, torch.where(sufficient, tokens, others))

    def finish(self, ints: torch.Tensor) -> None:
        """ints [2, R]: rows of the last tokens, and 1 where a row was drawn; the others take their best."""
        last_rows, drawn = ints
        count = last_rows.shape[0]
        scores = self._buffers.scores[:count]
        best_ids = first_argmax(scores)
        best = scores.gather(1, best_ids.unsqueeze(1)).squeeze(1)
        tokens = torch.where(drawn == 1, self._buffers.tokens[:count], best_ids)
        self._keep(last_rows, tokens, best, self._buffers.raw[:count])

    def greedy(self, last_rows: torch.Tensor) -> None:
        """Head and finish in one, for rows that take their best token as it is: int64 [R]."""
        logits = self._head(self._hidden[: last_rows.shape[0]]).float()
        tokens = first_argmax(logits)
        best = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
        self._keep(last_rows, tokens, best, logits)

    def logprobs(self, index: torch.Tensor) -> None:
        """Log probabilities of the sampled tokens, and the best alternatives, of these rows, int64 [D]."""
        raw = self._buffers.raw.index_select(0, index)
        tokens = self._buffers.tokens.index_select(0, index)
        columns = logprob_columns(raw, tokens, True, self._device)
        self._buffers.columns.index_copy_(0, index, columns)

    def beams(self, index: torch.Tensor) -> None:
        """The best tokens of these rows, int64 [D], by their edited log probabilities."""
        scores = self._buffers.scores.index_select(0, index)
        self._buffers.columns.index_copy_(0, index, beam_columns(scores, self._device))

    def score(self, turn: int) -> Callable[[torch.Tensor], None]:
        """Prompt log probabilities, for every other step.

        Takes int64 [3, rows]: hidden states of the last prefill, the tokens after them, where results go.
        """

        def run(ints: torch.Tensor) -> None:
            picks, targets, places = ints
            logits = self._head(self._buffers.chunk.index_select(0, picks)).float()
            columns = logprob_columns(logits, targets, True, self._device)
            self._buffers.prompts[turn].index_copy_(0, places, columns)

        return run

    def result(self, turn: int) -> Callable[[torch.Tensor], None]:
        """Puts all that every other step reports in one tensor. Takes the buffer `harmless`."""

        def run(harmless: torch.Tensor) -> None:
            samples = torch.cat((self._buffers.head, self._buffers.columns), dim=1)
            self._buffers.results[turn].copy_(torch.cat((harmless, samples.flatten())))

        return run

    @property
    def _spare(self) -> int:
        return self._buffers.tokens.shape[0] - 1

    def _rows(self, count: int) -> torch.Tensor:
        return torch.arange(count, device=self._device.torch_device)

    def _pending(self, pending_rows: torch.Tensor) -> torch.Tensor:
        waiting = self._last_tokens.index_select(0, pending_rows.clamp_min(0))
        return waiting.masked_fill(pending_rows < 0, NO_TOKEN)

    @staticmethod
    def _of(matrix: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Entries [W] of a matrix [S, V]."""
        return matrix.view(-1).index_select(0, rows * matrix.shape[1] + ids)

    @staticmethod
    def _penalized(
        values: torch.Tensor,
        rows: torch.Tensor,
        generated: torch.Tensor,
        repeated: torch.Tensor,
        penalties: torch.Tensor,
    ) -> torch.Tensor:
        """values [W], penalised where their tokens were seen; `repeated` ones once more than generated."""
        after = penalized(values, generated.clamp_min(0.0) + repeated, *penalties.index_select(1, rows))
        return torch.where((generated > NOT_SEEN) | repeated, after, values)

    def _scaled(self, index: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """Scores of rows, less their best, by their temperature. New, so that it may be changed in place."""
        scores = self._buffers.scores.index_select(0, index)
        shifted = scores - scores.amax(-1, keepdim=True)
        return shifted.div_(temperature.float().clamp_min(1e-30).unsqueeze(1))

    def _keep(
        self, last_rows: torch.Tensor, tokens: torch.Tensor, best: torch.Tensor, raw: torch.Tensor
    ) -> None:
        # Not by the maximum: whether that is NaN where one of the row is, a device need not say.
        # What is drawn from may have overflowed where the raw logits are finite.
        unusable = (raw.isnan() | (raw == torch.inf)).any(-1) | (best == torch.inf)
        status = torch.full_like(tokens, int(RowStatus.SAMPLED))
        status = status.masked_fill(best == -torch.inf, int(RowStatus.NOTHING_LEFT))
        status = status.masked_fill(unusable, int(RowStatus.NOT_FINITE))
        rows = self._rows(tokens.shape[0])
        self._buffers.tokens.index_copy_(0, rows, tokens)
        self._last_tokens.index_copy_(0, last_rows, tokens)
        head = torch.stack((tokens, status), dim=1).to(self._device.capabilities.wide_dtype)
        self._buffers.head.index_copy_(0, rows, head)
