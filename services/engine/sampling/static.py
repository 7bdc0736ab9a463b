"""Sampling where each new shape costs a compilation: in few static shapes, between buffers that stay.

Nothing is decided by values, since to learn them would be to wait for the device.
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
    filters_of,
    first_argmax,
)
from services.engine.sampling.program import Call
from services.engine.sampling.rows import PACKED_HEAD
from services.engine.sampling.stages import Head, Stages


@dataclass(frozen=True, slots=True)
class StaticSizes:
    """Most rows that are sampled, most rows and tokens of a prefill, most prompt tokens scored at once."""

    rows: int
    prefill_rows: int
    prefill_tokens: int
    slice_rows: int


@dataclass(frozen=True, slots=True)
class StaticBuffers:
    """Tensors that live as long as the engine. The last of S = rows + 1 rows takes padding.

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
        """Device memory that they take."""
        total = 0
        for one in fields(self):
            value = getattr(self, one.name)
            total += sum(tensor.nbytes for tensor in (value if isinstance(value, tuple) else (value,)))
        return total

    def unpack(self, host: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split one of `results` on the host into `harmless` and packed samples [S, 3 + 2 * n]."""
        harmless = self.harmless.shape[0]
        return host[:harmless], host[harmless:].view(self.raw.shape[0], -1)


def allocate(
    device: Device, sizes: StaticSizes, vocab_size: int, hidden_size: int, dtype: torch.dtype
) -> StaticBuffers:
    """Allocate zeroed buffers for a model whose hidden states are of `dtype`."""
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


class StaticStages(Stages):
    """The computations of every step, each compiled for itself."""

    search = ComparingSearch()
    restricted = True

    def __init__(
        self,
        head: Head,
        hidden: torch.Tensor,
        last_tokens: torch.Tensor,
        buffers: StaticBuffers,
        device: Device,
    ) -> None:
        super().__init__(head, hidden, last_tokens, device)
        self._buffers = buffers
        self.raw, self.scores, self.tokens = buffers.raw, buffers.scores, buffers.tokens
        self.chunk = buffers.chunk
        functions: dict[tuple[Phase, int], Forward] = {
            (phase, 0): getattr(self, phase.value)
            for phase in Phase
            if phase is not Phase.SCORE and hasattr(self, phase.value)
        }
        for turn in (1, 2):
            functions[Phase.SCORE, turn] = self._scores(turn)
            functions[Phase.RESULT, turn] = self._results(turn)
        compile_one = device.execution.compile
        self._forwards = {shape: compile_one(function) for shape, function in functions.items()}

    def forward(self, call: Call) -> Forward:
        """Return the function of a call's static shape."""
        per_turn = call.phase in (Phase.SCORE, Phase.RESULT)
        return self._forwards[call.phase, call.key if per_turn else 0]

    def begin(self, logits: torch.Tensor, restricted: torch.Tensor | None) -> None:
        rows = self._rows(logits.shape[0])
        self.raw.index_copy_(0, rows, logits)
        scores = logits if restricted is None else logits.masked_fill(restricted.unsqueeze(1), -torch.inf)
        self.scores.index_copy_(0, rows, scores)

    def edited(self) -> torch.Tensor:
        return self.scores

    def put(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        flat: torch.Tensor,
        values: torch.Tensor,
        fails: torch.Tensor | None,
    ) -> None:
        # Not through a view: a graph cannot update what is older than its capture by one.
        if fails is not None:
            rows = rows.masked_fill(fails, self.scores.shape[0] - 1)
        self.scores.index_put_((rows, ids), values)

    def normal(self, raw: torch.Tensor) -> torch.Tensor:
        total = raw.logsumexp(-1, keepdim=True)
        # What is normal already stays as it is, to the last bit.
        return raw - total.masked_fill(total.abs() < _ROUNDING, 0.0)

    def set_raw(self, index: torch.Tensor, raw: torch.Tensor) -> None:
        banned = self.scores.index_select(0, index) == -torch.inf
        self.raw.index_copy_(0, index, raw)
        self.scores.index_copy_(0, index, raw.masked_fill(banned, -torch.inf))

    def filter(self, ints: torch.Tensor, floats: torch.Tensor) -> None:
        """Draw from what filters leave, with a top_k of up to CANDIDATES."""
        self._filter(ints, floats, known=True)

    def filter_wide(self, ints: torch.Tensor, floats: torch.Tensor) -> None:
        """Draw from what filters leave, with any top_k."""
        self._filter(ints, floats, known=False)

    def _filter(self, ints: torch.Tensor, floats: torch.Tensor, *, known: bool) -> None:
        """`known`: the candidates tell the score of each row's top_k-th best."""
        index, temperature, uniform, filters = filters_of(
            ints, floats, any_top_k=True, any_exact=True, any_top_p=True
        )
        scaled, wide = self._scaled(index, temperature, every=False), self._wide
        # To ask which rows the candidates do not suffice for would be to wait: all are drawn both ways.
        best = candidates(scaled)
        tokens, sufficient = draw_candidates(scaled.clone(), best, uniform, filters, wide, self.search)
        place = (filters.top_k - 1).clamp(0, best[0].shape[1] - 1).unsqueeze(1)
        kth = best[0].gather(1, place).squeeze(1) if known else None
        others = draw_wide(scaled, filters, uniform, wide, self.search, kth=kth)
        self.set_drawn(index, torch.where(sufficient, tokens, others))

    def shifted(self, index: torch.Tensor, *, every: bool) -> torch.Tensor:
        scores = self.scores.index_select(0, index)
        return scores - scores.amax(-1, keepdim=True)

    def set_drawn(self, index: torch.Tensor, tokens: torch.Tensor) -> None:
        self.tokens.index_copy_(0, index, tokens)

    def chosen(self, drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.scores[: drawn.shape[0]]
        ids = first_argmax(scores)
        best = scores.gather(1, ids.unsqueeze(1)).squeeze(1)
        return torch.where(drawn == 1, self.tokens[: drawn.shape[0]], ids), best

    def unusable(self, raw: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        # Not by the maximum: whether that is NaN where one of the row is, a device need not say.
        # What is drawn from may have overflowed where the raw logits are finite.
        return (raw.isnan() | (raw == torch.inf)).any(-1) | (best == torch.inf)

    def set_result(self, tokens: torch.Tensor, status: torch.Tensor) -> None:
        rows = self._rows(tokens.shape[0])
        self.tokens.index_copy_(0, rows, tokens)
        head = torch.stack((tokens, status), dim=1).to(self._wide)
        self._buffers.head.index_copy_(0, rows, head)

    def set_columns(self, index: torch.Tensor, columns: torch.Tensor) -> None:
        self._buffers.columns.index_copy_(0, index, columns)

    def set_prompts(self, turn: int, places: torch.Tensor, columns: torch.Tensor) -> None:
        self._buffers.prompts[turn - 1].index_copy_(0, places, columns)

    def _scores(self, turn: int) -> Callable[[torch.Tensor], None]:
        """Return `score` for every other step."""

        def run(ints: torch.Tensor) -> None:
            self.score(turn, ints)

        return run

    def _results(self, turn: int) -> Callable[[torch.Tensor], None]:
        """Return the function that puts all that every other step reports in one tensor.

        It takes the buffer `harmless`.
        """

        def run(harmless: torch.Tensor) -> None:
            samples = torch.cat((self._buffers.head, self._buffers.columns), dim=1)
            self._buffers.results[turn - 1].copy_(torch.cat((harmless, samples.flatten())))

        return run
