"""Every device computation of a step goes through here: replayed, captured or run eagerly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import torch

from catenary.telemetry import get_logger
from services.engine.bucketing import Bucket
from services.engine.device import Device, ExecutionMode, Forward, ShapeKey, shape_key
from services.engine.tracing import Span, StepTracer


class Phase(Enum):
    """PREFILL and DECODE run in buckets; HEAD (logits) for a number of rows, CLEAR and MOVE of blocks.

    READ and WRITE are copies of blocks to the host and from there, where engines hand KV on.

    The others are the computations of sampling, which `sampling.program` gives counts.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    HEAD = "head"
    CLEAR = "clear"
    MOVE = "move"
    READ = "read"
    WRITE = "write"
    GREEDY = "greedy"
    NORMALIZE = "normalize"
    EDIT = "edit"
    PENDING = "pending"
    PENALIZE = "penalize"
    MASK = "mask"
    DRAW = "draw"
    FILTER = "filter"
    FILTER_WIDE = "filter_wide"
    FINISH = "finish"
    LOGPROBS = "logprobs"
    BEAMS = "beams"
    SCORE = "score"
    RESULT = "result"


Key = Bucket | int
"""A bucket, or the count that the phase's shape follows from."""


def size_of(phase: Phase, key: Key, block_size: int) -> int:
    """Tokens that a computation of this static shape touches, padding included: its cost in a rough unit."""
    if isinstance(key, int):
        return key
    if phase is Phase.PREFILL:
        return key.prefill_tokens(block_size)
    return key.batch + key.context_blocks * block_size


def name_of(phase: Phase, key: Key) -> str:
    """The shape as people read it in logs."""
    if isinstance(key, int):
        return f"{phase.value} count:{key}"
    return f"{phase.value} batch_size:{key.batch} query_len:{key.query} num_blocks:{key.context_blocks}"


@dataclass(slots=True)
class PhaseWork:
    """Of one forward of a phase, or of all. Tokens of a decode are rows; blocks are those of the context."""

    tokens: int = 0
    padding_tokens: int = 0
    blocks: int = 0
    padding_blocks: int = 0

    def add(self, other: PhaseWork) -> None:
        """Add another's work to this."""
        self.tokens += other.tokens
        self.padding_tokens += other.padding_tokens
        self.blocks += other.blocks
        self.padding_blocks += other.padding_blocks


class PaddingCounter:
    """Compares what forwards had to compute with the buckets that they ran in."""

    def __init__(self) -> None:
        self.prefill = PhaseWork()
        self.decode = PhaseWork()

    def add(self, phase: Phase, bucket: Bucket, *, tokens: int, blocks: int) -> PhaseWork:
        """One forward: `tokens` real tokens and `blocks` real context blocks, all rows together.

        Returns its work alone.
        """
        prefill = phase is Phase.PREFILL
        work = PhaseWork(
            tokens=tokens,
            padding_tokens=bucket.batch * bucket.query - tokens,
            blocks=blocks,
            padding_blocks=bucket.context_blocks * (bucket.batch if prefill else 1) - blocks,
        )
        (self.prefill if prefill else self.decode).add(work)
        return work


def describe(
    span: Span, key: Key, work: PhaseWork | None, *, way: str, compilations: int, warming: bool
) -> None:
    """Tell a computation's shape, its work and whether it was captured or compiled.

    `way` is replayed, captured, compiled or eager.
    """
    if isinstance(key, Bucket):
        span.args["bucket"] = f"batch {key.batch}, query {key.query}, blocks {key.context_blocks}"
        span.args |= asdict(key)
    else:
        span.args["count"] = key
    if work is not None:
        span.args |= asdict(work)
    span.args |= {"way": way, "compilations": compilations}
    if warming:
        span.args["warm_up"] = True
    span.category = "device"
    if compilations or way in ("captured", "compiled"):
        span.mark_compiled("captured" if way == "captured" else "compiled")


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
        self._execution = device.execution
        self._memory = device.memory
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
        if not self._execution.mode.captures or bucket in self._captured[phase]:
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
        """Compute `forward(*tensors)`. `key` names the static shape, of which the tensors must be.

        The result may be a buffer that the next run of the same shape overwrites. `work` is for traces.
        Raises what the forward raises.
        """
        with self._tracer.span(phase.value) as span:
            before = 0 if span is None else self._execution.compilations()
            result, way = self._run(phase, key, forward, tensors)
            if span is not None:
                describe(
                    span,
                    key,
                    work,
                    way=way,
                    compilations=self._execution.compilations() - before,
                    warming=self._warming == (phase, key),
                )
        return result

    def _run(
        self, phase: Phase, key: Key, forward: Forward, tensors: Sequence[torch.Tensor]
    ) -> tuple[Any, str]:
        """The result, and the way to it."""
        shape = shape_key(phase.value, tensors, key)
        compilations = self._execution.compilations()
        first = self._execution.shapes.note_key(shape)
        replay = self._replays.get(shape)
        if replay is not None:
            result, way = replay(*tensors), "replayed"
        elif self._captures((phase, key)):
            result = self._capture((phase, key), shape, forward, tensors)
            made = "compiled" if self._execution.mode is ExecutionMode.COMPILE else "captured"
            way = made if shape in self._replays else "eager"
        else:
            result, way = self._execution.run_eagerly(forward, tensors), "eager"
        if self._serving and self._warming != (phase, key):
            self._note(phase, key, first or self._execution.compilations() > compilations)
        return result, way

    def _captures(self, slot: Slot) -> bool:
        if not self._execution.mode.captures or slot in self._refused:
            return False
        return self._on_demand or slot == self._capturing

    def _capture(self, slot: Slot, shape: ShapeKey, forward: Forward, tensors: Sequence[torch.Tensor]) -> Any:
        phase, key = slot
        try:
            replay = self._execution.capture(forward, tensors)
            result = replay(*tensors)
        except Exception as error:
            if not self._memory.out_of_memory(error):
                raise
            self._refused.add(slot)
            if slot == self._capturing:
                raise
            log.warning("no memory left to capture a bucket: it runs eagerly", bucket=name_of(phase, key))
            return self._execution.run_eagerly(forward, tensors)
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
