"""The constraints of a core's sequences, as its loop needs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from services.engine.constraints.compiler import ConstraintCompiler
from services.engine.constraints.matching import Bits, ConstraintRefused, Matcher
from services.engine.constraints.restriction import Restriction, Taken
from services.engine.constraints.waiting import WaitingConstraints
from services.engine.domain import ConstraintOptions
from services.engine.link import ConstraintLoad
from services.engine.scheduler import Sequence, StepPlan


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Masks of a step: row rows[m] of its sampling rows may get the tokens of bits[m], int32 [M, W].

    `failed`: sequences whose matchers failed meanwhile.
    """

    rows: list[int]
    bits: Bits
    failed: list[Sequence]


class Constraints:
    """Those that wait for their constraints, and the restrictions of those that have them, by key."""

    def __init__(
        self,
        compiler: ConstraintCompiler | None,
        *,
        limit: int,
        seconds: float,
        wake: Callable[[], None],
    ) -> None:
        self._compiler = compiler
        self._restrictions: dict[int, Restriction] = {}
        self.waiting = WaitingConstraints(compiler, limit=limit, seconds=seconds, wake=wake)
        self._refused = 0
        self._masks = 0
        self._seconds = 0.0

    def add(self, sequence: Sequence, options: ConstraintOptions) -> bool:
        """Takes a constrained sequence. True if it may run now, else `ready` gives it.

        Raises QueueFull, and ConstraintRefused without a compiler.
        """
        restriction = self.waiting.add(sequence, options)
        if restriction is None:
            return False
        self._restrictions[sequence.key] = restriction
        return True

    def ready(self) -> Iterator[tuple[Sequence, ConstraintRefused | None]]:
        """Sequences that may run now, and those that never will, with the reason."""
        for sequence, result in self.waiting.take():
            if isinstance(result, ConstraintRefused):
                self._refused += 1
                yield sequence, result
            else:
                self._restrictions[sequence.key] = result
                yield sequence, None

    def forget(self, key: int) -> None:
        """Drops what is known of a sequence that ended."""
        self._restrictions.pop(key, None)

    def concern(self, plan: StepPlan) -> bool:
        """True if the plan samples for a constrained sequence."""
        return bool(self._restrictions) and any(sequence.constrained for sequence in plan.sampling())

    def masks(self, plan: StepPlan) -> StepMasks | None:
        """Masks of a step whose sequences have all their tokens; None if none of them lives."""
        if self._compiler is None:
            return None
        begun = time.perf_counter()
        rows: list[int] = []
        found: list[tuple[Sequence, Restriction]] = []
        for row, sequence in enumerate(plan.sampling()):
            restriction = self._restrictions.get(sequence.key)
            if restriction is not None and not sequence.finished:
                rows.append(row)
                found.append((sequence, restriction))
        if not rows:
            return None
        bits: Bits = np.empty((len(rows), self._compiler.vocabulary.words), dtype=np.int32)
        failed = self._fill(self._compiler, found, bits)
        self._masks += 1
        self._seconds += time.perf_counter() - begun
        return StepMasks(rows, bits, failed)

    @staticmethod
    def _fill(
        compiler: ConstraintCompiler, found: Items[tuple[Sequence, Restriction]], bits: Bits
    ) -> list[Sequence]:
        matchers: list[tuple[Matcher, int]] = [
            (restriction.matcher, index) for index, (_, restriction) in enumerate(found) if restriction.active
        ]
        if matchers:
            compiler.backend.fill(matchers, bits)
        failed: list[Sequence] = []
        for index, (sequence, restriction) in enumerate(found):
            if restriction.active and restriction.matcher.failed:
                failed.append(sequence)
                continue
            mask_stops = sequence.masks_stops(len(sequence.token_ids))
            restriction.narrow(bits[index], mask_stops=mask_stops)
        return failed

    def take(self, sequence: Sequence, token_id: int) -> Taken:
        """Tells of a token that a living sequence got."""
        restriction = self._restrictions.get(sequence.key)
        return Taken.GOES_ON if restriction is None else restriction.take(token_id)

    def complete(self, sequence: Sequence) -> bool:
        """True if a constrained sequence's text may end as it is."""
        restriction = self._restrictions.get(sequence.key)
        return restriction is not None and restriction.complete

    def load(self) -> ConstraintLoad:
        """The figures so far."""
        compiler = self._compiler
        if compiler is None:
            return ConstraintLoad()
        return ConstraintLoad(
            compiled=compiler.compiled,
            reused=compiler.reused,
            refused=self._refused,
            masks=self._masks,
            compile_seconds=compiler.seconds,
            mask_seconds=self._seconds,
        )
