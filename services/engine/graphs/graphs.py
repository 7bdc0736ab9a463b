"""Every device computation of a step goes through here: replayed, captured or run eagerly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from catenary.telemetry import get_logger
from services.engine.bucketing import Bucket
from services.engine.device import Device, ExecutionMode, Forward, ShapeKey, shape_key
from services.engine.graphs.padding import PaddingCounter, PhaseWork
from services.engine.graphs.phase import Key, Phase, name_of, size_of
from services.engine.graphs.spans import describe
from services.engine.tracing import StepTracer

log = get_logger(__name__)

Slot = tuple[Phase, Key]


class Graphs:
    """The captured buckets of one device.

    `on_demand` captures a shape when a request first needs it; otherwise only warm-up captures, and until it
    has, a bucket runs eagerly or in a larger one that is captured. `block_size` is that of the KV.
    """

    def __init__(
        self, device: Device, *, block_size: int, on_demand: bool = True, tracer: StepTracer | None = None
    ) -> None:
        self._device = device
        self._tracer = tracer or StepTracer()
        self._block_size = block_size
        self._on_demand = on_demand
        self._replays: dict[ShapeKey, Forward] = {}
        self._captured: dict[Phase, set[Key]] = {phase: set() for phase in Phase}
        self._refused: set[Slot] = set()
        self._chosen: dict[tuple[Phase, Bucket], Bucket] = {}
        self._warming: Slot | None = None
        self._capturing: Slot | None = None
        self._serving = False
        self._complete = False
        self.first_seen = 0
        self.padding = PaddingCounter()

    def choose(self, phase: Phase, bucket: Bucket) -> Bucket:
        """The bucket to run instead of `bucket`: itself if it is captured or runs eagerly anyway, else the
        captured one that covers it with the least work, else itself.
        """
        if not self._device.mode.captures or bucket in self._captured[phase]:
            return bucket
        if self._on_demand and (phase, bucket) not in self._refused:
            return bucket
        # The device's thread clears the choices when it captures.
        chosen = self._chosen.get((phase, bucket))
        if chosen is None:
            chosen = self._chosen[phase, bucket] = self._nearest(phase, bucket)
        return chosen

    def _nearest(self, phase: Phase, bucket: Bucket) -> Bucket:
        covering = [
            key
            for key in tuple(self._captured[phase])
            if isinstance(key, Bucket) and key.covers(bucket.batch, bucket.query, bucket.context_blocks)
        ]
        return min(covering, key=lambda key: (size_of(phase, key, self._block_size), key), default=bucket)

    def run(
        self,
        phase: Phase,
        key: Key,
        forward: Forward,
        tensors: Sequence[torch.Tensor],
        work: PhaseWork | None = None,
    ) -> Any:
        """Computes `forward(*tensors)`. `key` names the static shape, of which the tensors must be.

        The result may be a buffer that the next run of the same shape overwrites. `work` is for traces.
        Raises what the forward raises.
        """
        with self._tracer.span(phase.value) as span:
            before = 0 if span is None else self._device.compilations()
            result, way = self._run(phase, key, forward, tensors)
            if span is not None:
                describe(
                    span,
                    key,
                    work,
                    way=way,
                    compilations=self._device.compilations() - before,
                    warming=self._warming == (phase, key),
                )
        return result

    def _run(
        self, phase: Phase, key: Key, forward: Forward, tensors: Sequence[torch.Tensor]
    ) -> tuple[Any, str]:
        """The result, and the way to it."""
        shape = shape_key(phase.value, tensors, key)
        compilations = self._device.compilations()
        first = self._device.shapes.note_key(shape)
        replay = self._replays.get(shape)
        if replay is not None:
            result, way = replay(*tensors), "replayed"
        elif self._captures((phase, key)):
            result = self._capture((phase, key), shape, forward, tensors)
            made = "compiled" if self._device.mode is ExecutionMode.COMPILE else "captured"
            way = made if shape in self._replays else "eager"
        else:
            result, way = self._device.run_eagerly(forward, tensors), "eager"
        if self._serving and self._warming != (phase, key):
            self._note(phase, key, first or self._device.compilations() > compilations)
        return result, way

    def _captures(self, slot: Slot) -> bool:
        if not self._device.mode.captures or slot in self._refused:
            return False
        return self._on_demand or slot == self._capturing

    def _capture(self, slot: Slot, shape: ShapeKey, forward: Forward, tensors: Sequence[torch.Tensor]) -> Any:
        phase, key = slot
        try:
            replay = self._device.capture(forward, tensors)
            result = replay(*tensors)
        except Exception as error:
            if not self._device.out_of_memory(error):
                raise
            self._refused.add(slot)
            if slot == self._capturing:
                raise
            log.warning("no memory left to capture a bucket: it runs eagerly", bucket=name_of(phase, key))
            return self._device.run_eagerly(forward, tensors)
        self._replays[shape] = replay
        self._captured[phase].add(key)
        self._chosen.clear()
        return result

    def _note(self, phase: Phase, key: Key, first: bool) -> None:
        if not first:
            return
        self.first_seen += 1
        if self._complete:
            log.warning("a shape that warm-up did not see", shape=name_of(phase, key))

    @contextmanager
    def warming(self, phase: Phase, key: Key, *, capture: bool) -> Iterator[None]:
        """Inside, a `run` of this shape counts as warm-up, and captures it if asked to."""
        self._warming = (phase, key)
        self._capturing = self._warming if capture else None
        try:
            yield
        finally:
            self._warming = self._capturing = None

    def refuse(self, phase: Phase, key: Key) -> None:
        """Never captures this shape: it runs eagerly, or in a larger captured bucket."""
        self._refused.add((phase, key))

    @property
    def captured_count(self) -> int:
        """How many shapes are captured, of all phases."""
        return sum(map(len, self._captured.values()))

    def captured(self, phase: Phase) -> frozenset[Key]:
        """The captured shapes of a phase."""
        return frozenset(self._captured[phase])

    def serve(self) -> None:
        """From now on a shape that was never seen counts as such."""
        self._serving = True

    def complete(self) -> None:
        """Warm-up has seen every shape: from now on a new one is worth a warning."""
        self._complete = True
