"""The frontend between routers and the core: leases, admission, steps, loads and the engine's state."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from catenary.columns import StepRow
from catenary.telemetry import bind_request, get_logger, tracing
from catenary.v1 import common_pb2, engine_pb2
from services.engine.link import (
    CapacityFacts,
    ConstraintLoad,
    CoreLoad,
    CoreProgress,
    CoreReady,
    CoreStep,
    GraphLoad,
    ModelFacts,
    TransferLoad,
)
from services.engine.servicer.admission import (
    Admission,
    Inadmissible,
    SequenceLimits,
    duplicate,
    engine_lost,
    full,
    not_alone,
    not_taking,
    reserved,
    with_role,
)
from services.engine.servicer.contract import rows_of
from services.engine.servicer.core import Core, CoreRefusal
from services.engine.servicer.prefix_cache import PrefixCacheMirror
from services.engine.servicer.profiles import Profiles
from services.engine.servicer.routers import AttachedRouters, RouterOutbox
from services.engine.servicer.sequences import LiveSequence, OfferHandles, SequenceTable, SequenceTrace

log = get_logger(__name__)

StateListener = Callable[[engine_pb2.EngineState.ValueType], None]


class ProgressWatch:
    """Tells a stall from the times of steps. Times are seconds of any steady clock."""

    def __init__(self, stall_limit_s: float) -> None:
        self._limit = stall_limit_s
        self._since: float | None = None

    def on_work(self, now: float) -> None:
        """Note that a sequence was handed to the core. An idle core's time counts from here."""
        if self._since is None:
            self._since = now

    def on_step(self, now: float, *, more: bool) -> None:
        """Note a step of the core; `more` tells whether it still has work."""
        self._since = now if more else None

    def reset(self) -> None:
        """Start anew for a core that is new or gone."""
        self._since = None

    def stalled(self, now: float) -> bool:
        """Whether the core has had work without a step for longer than the limit."""
        return self._since is not None and now - self._since > self._limit


# Fields that describe the present. The others are counted from a core's start on.
_NOW: dict[type, frozenset[str]] = {
    CoreLoad: frozenset({"running", "waiting", "used_blocks", "pending_prefill_tokens"}),
    GraphLoad: frozenset({"captured", "warm", "to_warm"}),
    TransferLoad: frozenset({"offers", "blocks", "fetching"}),
}


class CoreLoads:
    """`now` is the load as of the core's last report; empty while there is no core."""

    def __init__(self) -> None:
        self.now = CoreLoad()
        # The counts of dead cores.
        self._past: CoreLoad | None = None
        # Set while the core keeps no KV for other engines.
        self._unoffered = asyncio.Event()
        self._unoffered.set()

    def take(self, load: CoreLoad) -> None:
        """Take over a report of the core."""
        self.now = load
        if load.transfers.offers:
            self._unoffered.clear()
        else:
            self._unoffered.set()

    def core_lost(self) -> None:
        """Add the counts of a dead core to those before."""
        self._past = self.total
        self.take(CoreLoad())

    @property
    def total(self) -> CoreLoad:
        """The load as it is now, with what is counted since the engine's start."""
        if self._past is None:
            return self.now
        total: CoreLoad = _added(self._past, self.now)
        return total

    async def unoffered(self) -> None:
        """Wait until the core keeps no KV that another engine is about to fetch."""
        await self._unoffered.wait()


def _added(past: Any, now: Any) -> Any:
    if isinstance(now, dict):
        return {key: past.get(key, 0) + now.get(key, 0) for key in past | now}
    if not isinstance(now, Struct):
        return past + now
    names = set(now.__struct_fields__) - _NOW.get(type(now), frozenset())
    return replace(now, **{name: _added(getattr(past, name), getattr(now, name)) for name in names})


class EngineFrontend:
    """Sequences, state and load of this engine. Used from one event loop; nothing here waits for a peer.

    `clock` gives steady seconds. `on_state` is told each change of state.
    """

    def __init__(
        self,
        *,
        stall_limit_s: float,
        kept_limit_s: float = math.inf,
        limits: SequenceLimits,
        remembered_handles: int,
        role: str = "both",
        on_state: StateListener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._on_state = on_state
        self._clock = clock
        self._table = SequenceTable(remembered_handles)
        self._role = role
        self._offers = OfferHandles(remembered_handles)
        self._watch = ProgressWatch(stall_limit_s)
        self.core: Core | None = None
        self._loads = CoreLoads()
        self._draining = False
        self._announced = engine_pb2.ENGINE_STATE_STARTING
        self._idle = asyncio.Event()
        self._idle.set()
        self.routers = AttachedRouters(kept_limit_s=kept_limit_s)
        self.profiles = Profiles()
        self.prefix_cache = PrefixCacheMirror()
        self.facts = asyncio.Event()
        self.ready: CoreReady | None = None
        self.admission: Admission | None = None
        self.progress = CoreProgress(activity="starting the core")
        self.core_restarts = 0
        # For operators, each empty once it is mended: why the core died, and why a router refused the engine.
        self.core_failure = ""
        self.router_refusal = ""

    @property
    def state(self) -> engine_pb2.EngineState.ValueType:
        """The engine's state now."""
        if self._draining:
            return engine_pb2.ENGINE_STATE_DRAINING
        if self.core is None:
            never = self.ready is None
            return engine_pb2.ENGINE_STATE_STARTING if never else engine_pb2.ENGINE_STATE_NOT_SERVING
        if self._watch.stalled(self._clock()):
            return engine_pb2.ENGINE_STATE_STALLED
        return engine_pb2.ENGINE_STATE_SERVING

    @property
    def draining(self) -> bool:
        """Whether the engine is about to end."""
        return self._draining

    @property
    def live_sequences(self) -> int:
        """Sequences that the core has, those that it is aborting included."""
        return len(self._table)

    def load(self) -> engine_pb2.LoadReport:
        """Return the load as of the core's last step; sequences handed over since then count as waiting."""
        load = self._loads.total
        running = min(load.running, self._table.places)
        return engine_pb2.LoadReport(
            state=self.state,
            running=running,
            waiting=self._table.places - running,
            used_blocks=load.used_blocks,
            total_blocks=self.ready.capacity.total_blocks if self.ready else 0,
            pending_prefill_tokens=load.pending_prefill_tokens,
            steps=load.steps,
            generated_tokens=load.generated_tokens,
            prompt_tokens=load.prompt_tokens,
            cached_prompt_tokens=load.cached_prompt_tokens,
            preemptions=load.preemptions,
        )

    @property
    def graphs(self) -> GraphLoad:
        """The core's static shapes as of its last report; counts since the engine's start."""
        return self._loads.total.graphs

    @property
    def transfers(self) -> TransferLoad:
        """Counts of KV transfers as of the core's last report."""
        return self._loads.total.transfers

    @property
    def constraints(self) -> ConstraintLoad:
        """Counts of constraints as of the core's last report."""
        return self._loads.total.constraints

    def refresh(self) -> None:
        """Tell the health service and all routers if the state changed."""
        state = self.state
        if state == self._announced:
            return
        names = engine_pb2.EngineState.Name
        log.info("engine state changed", old=names(self._announced), new=names(state))
        self._announced = state
        self._on_state(state)
        self.routers.report()

    async def watch(self, every_s: float) -> None:
        """Look for a stall, and for a router's turn that is too long, for ever, `every_s` seconds apart."""
        while True:
            await asyncio.sleep(every_s)
            self.refresh()
            self.routers.end_long_turn(self._clock())

    def core_ready(self, core: Core, ready: CoreReady, served_model_name: str) -> None:
        """Serve with a core that came up. Routers that know other facts are left, to attach anew."""
        if self.ready is not None and _facts(ready) != _facts(self.ready):
            self.routers.close("the engine's capacity changed")
        self.core, self.ready = core, ready
        self.core_failure = ""
        self.admission = Admission(served_model_name, ready.model, ready.capacity, self._limits)
        self._watch.reset()
        self.profiles.core_ready(core)
        self.prefix_cache.core_ready(core, publishes=ready.publishes_kv)
        self.facts.set()
        self.refresh()

    def core_lost(self) -> None:
        """End every sequence of a dead core with a retryable error."""
        self.core = None
        self._loads.core_lost()
        self._watch.reset()
        self.profiles.core_lost()
        self._offers.clear()
        self.prefix_cache.core_lost()
        self._end_all(engine_lost("The engine's core died."))
        self.refresh()

    def core_stepped(self, step: CoreStep) -> None:
        """Pass a step on: one message for each router that has rows in it."""
        self._loads.take(step.load)
        for row in rows_of(step.columns):
            sequence = self._table.get(row.handle)
            if sequence is not None:
                self._pass_on(sequence, row)
        self._watch.on_step(self._clock(), more=bool(self._table))
        self._settle()
        self.routers.flush()
        self.refresh()

    def _pass_on(self, sequence: LiveSequence, row: StepRow) -> None:
        sequence.take(row)
        port = self.routers.port(sequence.link)
        if port is not None and (row.token_ids or row.prompt_logprobs is not None or row.end is not None):
            row.handle = sequence.handle
            port.steps.add(row, first=not sequence.told)
            sequence.told = True
        if row.end is not None:
            if row.end.HasField("kv_offer"):
                self._note_offer(sequence)
            self._table.end(sequence)
            if row.end.HasField("error"):
                with bind_request(sequence.request_id, None):
                    log.warning("sequence failed", code=common_pb2.ErrorCode.Name(row.end.error.code))

    def _note_offer(self, sequence: LiveSequence) -> None:
        if sequence.link is not None:
            self._offers.add(sequence.link, sequence.handle, sequence.key)
        elif self.core is not None:
            # Its router is gone, and no other one knows of the offer.
            self.core.abort([sequence.key])

    def leave(self, port: RouterOutbox) -> None:
        """Abort the sequences of a router that is gone. Idempotent."""
        if not self.routers.leave(port):
            return
        live, past = self._table.leave(port.link), self._offers.leave(port.link)
        if live + past and self.core is not None:
            # Most offers are fetched by now.
            log.info("aborting the sequences of a lost router", sequences=len(live), offers=len(past))
            self.core.abort(live + past)

    def submit(self, port: RouterOutbox, message: common_pb2.Submit) -> None:
        """Take a sequence, or answer with a refusal."""
        try:
            self._take(port, message)
        except (Inadmissible, CoreRefusal) as exc:
            with bind_request(message.spec.request_id, message.spec.traceparent or None):
                log.debug("sequence refused", code=common_pb2.ErrorCode.Name(exc.error.code), reason=str(exc))
            port.refuse(message.handle, exc.error)

    def _take(self, port: RouterOutbox, message: common_pb2.Submit) -> None:
        core, admission, spec = self.core, self.admission, message.spec
        if self._table.known(port.link, message.handle):
            raise CoreRefusal(duplicate())
        if core is None or admission is None or self.state != engine_pb2.ENGINE_STATE_SERVING:
            raise CoreRefusal(not_taking(self.state))
        if self.routers.reserved_from(port.link):
            raise CoreRefusal(reserved())
        if message.alone and self._table:
            raise CoreRefusal(not_alone())
        limit = admission.capacity.max_running + admission.capacity.max_waiting
        if self._table.places >= limit:
            raise CoreRefusal(full(limit))
        hinted = message.HasField("same_prompt_as")
        alike = self._table.find(port.link, message.same_prompt_as) if hinted else None
        resolved = admission.resolve(spec, self._table.new_key(), 0 if alike is None else alike.key)
        resolved = with_role(resolved, message, self._role)
        places = 1 if resolved.beams is None else resolved.beams.width
        if self._table.places + places > limit:
            raise CoreRefusal(full(limit))
        core.submit(resolved)
        emitted = len(resolved.token_ids) - resolved.prompt_len
        self._table.add(
            LiveSequence(
                resolved.key,
                port.link,
                message.handle,
                spec.request_id,
                resolved.prompt_len,
                emitted,
                places,
                trace=SequenceTrace(spec) if tracing() else None,
            )
        )
        self._idle.clear()
        self._watch.on_work(self._clock())

    def abort(self, port: RouterOutbox, handle: int) -> None:
        """Abort a sequence and answer with what was found. Idempotent."""
        sequence = self._table.find(port.link, handle)
        if sequence is None:
            ended = self._table.ended(port.link, handle)
            offering = self._offers.take(port.link, handle)
            if offering is not None and self.core is not None:
                self.core.abort([offering])
            port.abort_result(
                handle,
                common_pb2.ABORT_OUTCOME_ALREADY_FINISHED if ended else common_pb2.ABORT_OUTCOME_UNKNOWN,
            )
            return
        if not sequence.aborting and self.core is not None:
            sequence.aborting = True
            self.core.abort([sequence.key])
        port.abort_result(handle, common_pb2.ABORT_OUTCOME_ABORTED)

    def drain(self) -> None:
        """Take nothing new from now on."""
        self._draining = True
        self.refresh()

    async def idle(self) -> None:
        """Wait until the core has no sequence, and no KV that another engine is about to fetch. To be called
        when nothing new is taken: routers know that too, then."""
        await self._idle.wait()
        await self._loads.unoffered()
        await self.routers.all_know_of_drain()

    def give_up(self) -> None:
        """End what is left with a retryable error: the drain took too long."""
        self._end_all(engine_lost("The engine is shutting down."))

    def _end_all(self, error: common_pb2.Error) -> None:
        for sequence in self._table.take_all():
            end = sequence.fail(error)
            port = self.routers.port(sequence.link)
            if port is not None:
                port.steps.add(StepRow(sequence.handle, end=end))
        self._settle()
        self.routers.flush()

    def _settle(self) -> None:
        if not self._table and not self._idle.is_set():
            self._idle.set()
            # Routers learn at once, not with the next interval, that nothing is left here.
            self.routers.report()


def _facts(ready: CoreReady) -> tuple[ModelFacts, CapacityFacts, bool]:
    """Return the facts of a core that routers were told."""
    return ready.model, ready.capacity, ready.publishes_kv
