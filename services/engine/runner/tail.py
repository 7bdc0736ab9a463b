"""What a step does after its forwards: it samples, and begins the copy of all that it has to tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from services.engine.device import Forward
from services.engine.graphs import Phase
from services.engine.runner.staging import Staged, StepStaging
from services.engine.sampling import MaskBuffer, RowParams, TokenMasks
from services.engine.scheduler import PrefillChunk


@dataclass(frozen=True, slots=True)
class StepParts:
    """What a step tells, on the host; None: it has no such part.

    harmless [rows]: whether each row of the prefill went well. prompts: packed scores of prompt tokens.
    samples: packed samples. Rows of padding may follow in each. best: in place of samples, the best tokens,
    int64 [rows], and their logits, where nothing else was wanted.
    """

    harmless: torch.Tensor | None
    prompts: torch.Tensor | None
    samples: torch.Tensor | None
    best: tuple[torch.Tensor, torch.Tensor] | None = None


class StepCopy(Protocol):
    """A copy that was begun."""

    def wait(self) -> StepParts:
        """Its parts, once they are there."""


class StepTail(Protocol):
    """One step's, with its inputs on the device. What is called runs where the device's work does."""

    @property
    def decoding(self) -> Forward | None:
        """What runs as the step's decode, prepared for what is in its one tensor. None: `Phases.decode`."""

    def after_prefill(self, result: Any) -> None:
        """Takes what the prefill's forward returned."""

    def restrict(self, masks: TokenMasks, buffer: MaskBuffer) -> None:
        """Takes what may follow in constrained rows, on the host, before `sample`. Only if `masked`.

        The masks are sent from the step's buffer.
        """

    def sample(self) -> None:
        """Samples, and keeps the tokens for the next step."""

    def copy(self) -> StepCopy:
        """Begins the copy to the host."""


@dataclass(frozen=True, slots=True)
class TailRequest:
    """What a step asks of its tail.

    prefills with `query` tokens a row in the forward; sampled rows, in the order of the hidden states, and
    their rows of the last tokens. `turn` is 0 or 1, for the steps that may be in flight. `masked`: the tail
    may be restricted before it samples. `decodes`: inputs of the decode, of a step that is nothing else.
    """

    prefills: Sequence[PrefillChunk]
    query: int
    sampled: list[RowParams]
    last_rows: list[int]
    staging: StepStaging
    turn: int
    masked: bool = False
    decodes: Staged | None = None


class Tails(Protocol):
    """Makes tails. Of static shapes it has `counts`, for each of its phases, which it can be asked to run."""

    @property
    def counts(self) -> Mapping[Phase, tuple[int, ...]]:
        """The static shapes that warm-up visits."""

    @property
    def prefill(self) -> Forward:
        """The forward of a prefill, whose result `after_prefill` wants."""

    @property
    def prefill_sampled(self) -> Forward:
        """The same for steps that score no tokens of prompts."""

    @property
    def bytes(self) -> int:
        """Device memory that it holds for good."""

    def prepare(self, request: TailRequest) -> StepTail:
        """Lays out a step's inputs, on the host."""

    def dummy(self, phase: Phase, count: int) -> StepTail:
        """A tail whose `sample` runs one of the static shapes on padding alone."""


class NoTail:
    """Of a forward on padding, from which nobody wants to know anything. Implements `StepTail`."""

    decoding = None

    def after_prefill(self, result: Any) -> None:
        return

    def restrict(self, masks: TokenMasks, buffer: MaskBuffer) -> None:
        raise ValueError("a forward on padding samples nothing")

    def sample(self) -> None:
        return

    def copy(self) -> StepCopy:
        raise ValueError("a forward on padding has nothing to tell")
