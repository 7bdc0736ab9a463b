"""The scripted core: the scripted machine on the servicer's own event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import nullcontext

from msgspec.structs import replace

from catenary.parameters import SAMPLING
from catenary.v1 import common_pb2
from catenary_testing.engine.faults import Faults
from catenary_testing.engine.machine import QueueFull, ScriptedMachine
from catenary_testing.engine.script import Script, Then
from services.engine.core import Profiler
from services.engine.link import (
    CancelProfile,
    CapacityFacts,
    CoreFailed,
    CoreLoad,
    CoreProgress,
    CoreReady,
    ModelFacts,
    StartProfile,
    SubmitSequence,
)
from services.engine.servicer import Core, CoreEvent, CoreRefusal, CoreStartError, ProgressSink
from services.engine.tracing import StepTracer

_EXIT_STATUS = 70
_START_REPORTS = 10


class ScriptedCore(Core):
    """One life of a scripted core. `faults` is shared by all lives of the engine."""

    def __init__(
        self, script: Script, faults: Faults, *, restart: bool = False, profile_max_events: int = 200_000
    ) -> None:
        self._script = script
        self._faults = faults
        self._restart = restart
        self._machine = ScriptedMachine(script)
        self._tracer = StepTracer()
        self._profiler = Profiler(self._tracer, max_events=profile_max_events, device=lambda: nullcontext([]))
        # The last step that was begun.
        self._step = 0
        self._wake = asyncio.Event()
        self._stopped = False

    async def start(self, on_progress: ProgressSink) -> CoreReady:
        """Take the scripted time, then be ready. Raises CoreStartError if the script makes a restart fail."""
        pause = self._script.start_delay_ms / 1000 / _START_REPORTS
        for part in range(_START_REPORTS if pause else 0):
            on_progress(CoreProgress(activity="pretending to load weights", fraction=part / _START_REPORTS))
            await asyncio.sleep(pause)
        if self._restart and self._faults.fail_restarts:
            self._faults.fail_restarts -= 1
            raise CoreStartError("the scripted core was told to fail this start")
        model, capacity = self._script.model, self._script.capacity
        return CoreReady(
            model=ModelFacts(
                max_model_len=model.max_model_len,
                vocab_size=model.vocab_size,
                eos_token_ids=list(model.eos_token_ids),
                dtype=model.dtype,
                tokenizer_sha256=model.tokenizer_sha256,
                sampling_defaults={
                    name: value for name in SAMPLING if (value := getattr(model, name, None)) is not None
                },
                task=model.task,
                embedding_width=model.embedding_width,
                embedding_dimensions=list(model.embedding_dimensions),
                any_dimensions=model.any_dimensions,
                labels=list(model.labels),
            ),
            capacity=CapacityFacts(
                block_size=capacity.block_size,
                total_blocks=capacity.total_blocks,
                max_running=capacity.max_running,
                max_waiting=capacity.max_waiting,
                max_batched_tokens=capacity.max_batched_tokens,
            ),
            publishes_kv=capacity.prefix_caching and model.task == "generate",
        )

    def submit(self, sequence: SubmitSequence) -> None:
        """Queue a sequence, unless a fault or a full queue refuses it."""
        if self._faults.refusals:
            raise CoreRefusal(self._faults.refusals.popleft())
        if sequence.kv_offer is not None and self._faults.fail_transfers:
            self._faults.fail_transfers -= 1
            sequence = replace(sequence, kv_offer=replace(sequence.kv_offer, ticket=b""))
        try:
            self._machine.submit(sequence)
        except QueueFull:
            limit = self._script.capacity.max_waiting
            message = f"The engine's waiting queue is full (max_waiting {limit})."
            error = common_pb2.Error(code=common_pb2.ERROR_CODE_OVERLOADED, message=message, retryable=True)
            raise CoreRefusal(error) from None
        self._wake.set()

    def abort(self, keys: Iterable[int]) -> None:
        """End sequences with the next step."""
        self._machine.abort(keys)
        self._wake.set()

    def follow_kv(self) -> None:
        """Tell the cache's contents soon."""
        self._machine.kv_event_delta.follow()
        self._wake.set()

    def profile(self, message: StartProfile | CancelProfile) -> None:
        """Record spans of the next steps, or stop that."""
        if isinstance(message, StartProfile):
            self._profiler.start(message, self._step)
        else:
            self._profiler.cancel(message)
        self._wake.set()

    async def events(self) -> AsyncIterator[CoreEvent]:
        """Step while there is work; end with CoreFailed at a crash."""
        faults, machine = self._faults, self._machine
        while not self._stopped:
            for message in (*self._profiler.due(), *machine.kv_event_delta.due()):
                yield message
            if faults.crash_reason is not None:
                reason, faults.crash_reason = faults.crash_reason, None
                yield CoreFailed(reason=reason)
                return
            if not machine.has_work or faults.holding():
                await self._wait()
                continue
            match machine.stuck():
                case Then.CRASH:
                    faults.crash("a rule of the script crashed the core")
                    continue
                case Then.STALL:
                    faults.stall()
                    continue
            self._step = machine.load.steps + 1
            with self._tracer.span("wait", self._step):
                await asyncio.sleep(machine.step_delay_s + faults.step_delay_s)
            if faults.holding():
                continue
            with self._tracer.span("commit", self._step):
                step = machine.step()
            await self._pass_time(machine.cost_s)
            if step is not None and faults.crash_reason is None:
                longest = machine.longest
                self._note(step.load)
                yield step
                self._set_off(longest)

    async def stop(self) -> None:
        """End the loop of `events`."""
        self._stopped = True
        self._wake.set()

    async def _pass_time(self, seconds: float) -> None:
        """Let a step take its time by the latency model; what it gives is held back while it is stalled."""
        if not seconds:
            return
        await asyncio.sleep(seconds)
        while self._faults.stalled and self._faults.crash_reason is None and not self._stopped:
            await self._wait()

    def _note(self, load: CoreLoad) -> None:
        self._tracer.counters("sequences", running=load.running, waiting=load.waiting)
        self._tracer.counters("KV blocks", used=load.used_blocks)
        self._profiler.ended(load.steps)

    async def _wait(self) -> None:
        self._wake.clear()
        self._faults.changed.clear()
        if self._faults.crash_reason is not None:
            return
        wake = [asyncio.ensure_future(e.wait()) for e in (self._wake, self._faults.changed)]
        try:
            await asyncio.wait(wake, return_when=asyncio.FIRST_COMPLETED, timeout=self._profiler.remaining)
        finally:
            for task in wake:
                task.cancel()

    def _set_off(self, longest: int) -> None:
        match self._faults.on_generated(longest):
            case "drop":
                self._faults.drop_streams()
            case "exit":
                os._exit(_EXIT_STATUS)
            case "crash":
                self._faults.crash()
            case "stall":
                self._faults.stall()
