"""Sampling where a new shape costs nothing: tensors are made as they are needed, and work follows the values.

The device may be asked which rows need a costly computation. Logits are copied only if they are edited.
"""

from __future__ import annotations

from typing import Any

import torch

from services.engine.device import Device
from services.engine.graphs import Phase
from services.engine.sampling.draw import (
    IndexedSearch,
    candidates,
    draw_candidates,
    draw_wide,
    filters_of,
    first_argmax,
)
from services.engine.sampling.program import Call
from services.engine.sampling.stages import Head, Stages


class ExactStages(Stages):
    """The computations of one step, in exact counts."""

    search = IndexedSearch()

    def __init__(self, head: Head, hidden: torch.Tensor, last_tokens: torch.Tensor, device: Device) -> None:
        super().__init__(head, hidden, last_tokens, device)
        self.columns: torch.Tensor | None = None
        self.prompts: list[torch.Tensor] = []
        self._edited: torch.Tensor | None = None
        self._restricted = False
        self._waiting: torch.Tensor | None = None
        self._best: tuple[torch.Tensor, torch.Tensor] | None = None
        self._drawn: torch.Tensor | None = None
        self._status: torch.Tensor | None = None

    def run(self, call: Call) -> None:
        """Compute one call of an exact program."""
        compute: Any = getattr(self, call.phase.value)
        if call.phase is Phase.SCORE:
            compute(call.key, *call.tensors, **call.known)
        else:
            compute(*call.tensors, **call.known)

    def packed(self) -> torch.Tensor:
        """Return all that the host wants to know of the samples as one tensor, [R, 3 + 2 * n], wide.

        Columns: token, RowStatus, log probability, n ids of the best alternatives, n log probabilities. Ids
        below 2**24 are exact even in float32.
        """
        if self._status is None:
            raise ValueError("nothing was sampled")
        head = torch.stack((self.tokens, self._status), dim=1).to(self._wide)
        columns = torch.zeros_like(head[:, :1]) if self.columns is None else self.columns
        return torch.cat((head, columns), dim=1)

    def begin(self, logits: torch.Tensor, restricted: torch.Tensor | None) -> None:
        self.raw = self.scores = logits
        if restricted is not None:
            self._restricted = True
            self.edited()[:-1].masked_fill_(restricted.unsqueeze(1), -torch.inf)

    def edited(self) -> torch.Tensor:
        if self._edited is None:
            self.raw = self.raw.contiguous()
            rows, width = self.raw.shape
            self._edited = self.raw.new_empty((rows + 1, width))
            self.scores = self._edited[:rows]
            self.scores.copy_(self.raw)
        return self._edited

    def put(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        flat: torch.Tensor,
        values: torch.Tensor,
        fails: torch.Tensor | None,
    ) -> None:
        scores = self.edited()
        if fails is not None:
            flat = flat.masked_fill(fails, scores.numel() - 1)
        scores.view(-1).scatter_(0, flat, values)

    @property
    def restricted(self) -> bool:
        return self._restricted

    def waiting(self, pending_rows: torch.Tensor) -> torch.Tensor:
        if self._waiting is None:
            self._waiting = super().waiting(pending_rows)
        return self._waiting

    def normal(self, raw: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(raw, dim=-1)

    def set_raw(self, index: torch.Tensor, raw: torch.Tensor) -> None:
        self.raw = self.raw.index_copy(0, index, raw)
        if self._edited is None:
            self.scores = self.raw
            return
        banned = self.scores.index_select(0, index) == -torch.inf
        self._edited.index_copy_(0, index, raw.masked_fill(banned, -torch.inf))

    def mask(self, index: torch.Tensor, allowed: torch.Tensor) -> None:
        self._restricted = True
        super().mask(index, allowed)

    def filter(
        self,
        ints: torch.Tensor,
        floats: torch.Tensor,
        *,
        every: bool = False,
        any_top_k: bool = True,
        any_exact: bool = True,
        any_top_p: bool = True,
    ) -> None:
        """Draw among the best candidates.

        A row is drawn again from the whole vocabulary if its filters leave more than candidates.
        """
        index, temperature, uniform, filters = filters_of(
            ints, floats, any_top_k=any_top_k, any_exact=any_exact, any_top_p=any_top_p
        )
        scaled, wide = self._scaled(index, temperature, every=every), self._wide
        tokens, sufficient = draw_candidates(scaled, candidates(scaled), uniform, filters, wide, self.search)
        again = self._device.kernels.rows_to_redo(~sufficient)
        if again.shape[0]:
            some = self._scaled(index.index_select(0, again), temperature.index_select(0, again), every=False)
            number = uniform.index_select(0, again)
            redone = draw_wide(some, filters.select(again), number, wide, self.search)
            known = tokens.index_select(0, again)
            redone = torch.where(sufficient.index_select(0, again), known, redone)
            tokens = tokens.index_copy(0, again, redone)
        self.set_drawn(index, tokens)

    def shifted(self, index: torch.Tensor, *, every: bool) -> torch.Tensor:
        _, best = self._best_tokens()
        if every:
            return self.scores - best.unsqueeze(1)
        shifted = self.scores.index_select(0, index)
        shifted -= best.index_select(0, index).unsqueeze(1)
        return shifted

    def set_drawn(self, index: torch.Tensor, tokens: torch.Tensor) -> None:
        self._best_tokens()[0].index_copy_(0, index, tokens)

    def chosen(self, drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._best_tokens()

    def unusable(self, raw: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        # The maximum is NaN if anything in the row is, infinite if something overflowed. Allowed ids and
        # masks hide logits. Penalties and biases may overflow what was finite.
        usable = best < torch.inf
        if self._restricted:
            usable &= raw.amax(-1) < torch.inf
        return ~usable

    def set_result(self, tokens: torch.Tensor, status: torch.Tensor) -> None:
        self.tokens, self._status = tokens, status

    def set_columns(self, index: torch.Tensor, columns: torch.Tensor) -> None:
        if self.columns is None:
            self.columns = columns.new_zeros((self.tokens.shape[0], columns.shape[1]))
        self.columns.index_copy_(0, index, columns)

    def set_prompts(self, turn: int, places: torch.Tensor, columns: torch.Tensor) -> None:
        self.prompts.append(columns)

    def _best_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens int64 [R], the best of each row until it is drawn, and the best scores [R]."""
        if self._best is None:
            tokens = first_argmax(self.scores)
            self._best = tokens, self.scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
        return self._best
