"""Visit every static shape of an engine once, before serving or between steps, and capture those that fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from catenary.telemetry import get_logger
from services.engine.device import Memory
from services.engine.graphs.budget import CaptureSchedule, Shape
from services.engine.graphs.graphs import Graphs, Key, Phase, name_of

log = get_logger(__name__)

_GIB = 2**30
# As people grep for them.
_TITLES = {phase: phase.value.capitalize() for phase in Phase} | {Phase.PREFILL: "Prompt"}

Dummy = Callable[[Phase, Key], None]
"""Runs a forward of this shape on padding alone, through `Graphs.run`, and waits for it."""


@dataclass(slots=True)
class WarmUpReport:
    """Result of a warm-up.

    bytes_of: what the captures of a phase hold; missing_bytes: what more the shapes over budget were expected
    to take; unusable: shapes without memory even to run once.
    """

    captured: list[Shape] = field(default_factory=list)
    eager: list[Shape] = field(default_factory=list)
    out_of_memory: list[Shape] = field(default_factory=list)
    over_budget: list[Shape] = field(default_factory=list)
    unusable: list[Shape] = field(default_factory=list)
    bytes_of: dict[Phase, int] = field(default_factory=dict)
    missing_bytes: int = 0
    seconds: float = 0.0

    @property
    def graph_bytes(self) -> int:
        """Bytes that all captures hold."""
        return sum(self.bytes_of.values())


class WarmUp:
    """Goes through the schedule, then through the shapes that are not captured. One shape a `step`.

    `eager`: shapes that are run without a capture, since they bypass it or the device has none. `on_end` gets
    the report.
    """

    def __init__(
        self,
        graphs: Graphs,
        memory: Memory,
        dummy: Dummy,
        schedule: CaptureSchedule,
        eager: Sequence[Shape],
        *,
        on_end: Callable[[WarmUpReport], None] = lambda _: None,
    ) -> None:
        self._graphs = graphs
        self._memory = memory
        self._dummy = dummy
        self._schedule = schedule
        self._eager = list(eager)
        self._on_end = on_end
        for shape in eager:
            graphs.refuse(shape.phase, shape.key)
        self.report = WarmUpReport()
        self.total = schedule.total + len(self._eager)
        self.done = 0
        self._left = self._visits()
        self.pending = True

    def step(self) -> bool:
        """Visit one shape. False, and `pending` with it, once nothing is left."""
        started = time.monotonic()
        self.pending = next(self._left, False)
        self.report.seconds += time.monotonic() - started
        if not self.pending:
            self._finish()
        return self.pending

    def run(self, progress: Callable[[int, int], None]) -> None:
        """Visit all; tell how many are done of how many before each."""
        progress(0, self.total)
        while self.step():
            progress(self.done, self.total)

    def _visits(self) -> Iterator[bool]:
        while (shape := self._schedule.next()) is not None:
            self._capture(shape)
            yield True
        self.report.over_budget = list(self._schedule.over_budget)
        self.report.out_of_memory = list(self._schedule.out_of_memory)
        self.report.missing_bytes = self._schedule.missing_bytes()
        for shape in [*self._eager, *self.report.over_budget, *self.report.out_of_memory]:
            self._graphs.refuse(shape.phase, shape.key)
            self._run(shape)
            yield True

    def _capture(self, shape: Shape) -> None:
        def work() -> None:
            with self._graphs.warming(shape.phase, shape.key, capture=True):
                self._dummy(shape.phase, shape.key)

        try:
            use = self._memory.measure(work)
        except Exception as error:
            if not self._memory.out_of_memory(error):
                raise
            self._schedule.failed(shape)
            log.warning("no memory left to capture a bucket", bucket=name_of(shape.phase, shape.key))
            return
        self._schedule.captured(shape, use.kept)
        self.report.captured.append(shape)
        self.report.bytes_of[shape.phase] = self.report.bytes_of.get(shape.phase, 0) + use.kept
        self._log("Graph", shape)

    def _run(self, shape: Shape) -> None:
        try:
            with self._graphs.warming(shape.phase, shape.key, capture=False):
                self._dummy(shape.phase, shape.key)
        except Exception as error:
            if not self._memory.out_of_memory(error):
                raise
            self.report.unusable.append(shape)
            log.warning("no memory to run a bucket", bucket=name_of(shape.phase, shape.key))
            return
        self.report.eager.append(shape)
        self._log("Eager", shape)

    def _log(self, kind: str, shape: Shape) -> None:
        self.done = min(self.done + 1, self.total)
        free = self._memory.figures().free / _GIB
        phase = _TITLES[shape.phase].lower()
        name = name_of(shape.phase, shape.key).split(" ", 1)[1]
        log.info(f"[Warmup][{kind}/{phase}][{self.done}/{self.total}] {name} free_mem:{free:.2f} GiB")

    def _finish(self) -> None:
        report = self.report
        self._graphs.complete()
        for phase in Phase:
            self._log_phase(phase)
        for text, shapes in (
            (
                "buckets over the graph budget run eagerly or in a larger one: raise graph-reserved-mem",
                report.over_budget,
            ),
            ("buckets without memory for a capture run eagerly or in another one", report.out_of_memory),
            ("buckets without memory to run at all", report.unusable),
        ):
            if shapes:
                names = [name_of(shape.phase, shape.key) for shape in shapes]
                log.warning(text, count=len(names), buckets=names)
        log.info(
            f"Warmup finished in {report.seconds:.0f} secs, "
            f"graphs hold {report.graph_bytes / _GIB:.2f} GiB of device memory"
        )
        self._on_end(report)

    def _log_phase(self, phase: Phase) -> None:
        captured = [shape for shape in self.report.captured if shape.phase is phase]
        if captured:
            others = [*self.report.eager, *self.report.unusable]
            count = len(captured) + sum(shape.phase is phase for shape in others)
            used = self.report.bytes_of.get(phase, 0) / _GIB
            log.info(
                f"Graph/{_TITLES[phase]} captured:{len(captured)} ({len(captured) / count:.1%}) "
                f"used_mem:{used:.2f} GiB"
            )


class BackgroundWarmUp:
    """Paces a warm-up. An idle engine captures at once; a busy one serves, after each capture, for at least
    as long as that took, so that warm-up gets no more than half of the time. `clock` gives steady seconds.
    """

    def __init__(self, warm_up: WarmUp, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._warm_up = warm_up
        self._clock = clock
        self._not_before = 0.0
        self.pending = warm_up.pending

    @property
    def done(self) -> int:
        """Shapes visited."""
        return self._warm_up.done if self.pending else self._warm_up.total

    @property
    def total(self) -> int:
        """Shapes to visit."""
        return self._warm_up.total

    def turn(self, *, busy: bool) -> bool:
        """Capture one shape if it is time for one; True if it did. A defect ends the warm-up alone."""
        now = self._clock()
        if not self.pending or (busy and now < self._not_before):
            return False
        try:
            self.pending = self._warm_up.step()
        except Exception:
            log.exception("the warm-up ends early: what is not captured runs eagerly")
            self.pending = False
        ended = self._clock()
        self._not_before = 2 * ended - now
        return True
