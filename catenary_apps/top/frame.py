"""One frame of `catenary top`: the fleet's state, with tokens per second from the engines' reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from catenary.v1 import common_pb2, engine_pb2, router_pb2
from catenary_apps.cli.routers import RouterView, enum_word

# Reports further apart than that are averaged no more.
_WINDOW_S = 5.0
# When a report was made is known to a few milliseconds: closer ones say nothing about a rate.
_LEAST_S = 0.1


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens that an engine had generated since its start. `at`: the report's time, in seconds of a clock."""

    at: float
    generated_tokens: int


class Rates:
    """Remembers the last seconds of each engine."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[Progress]] = {}

    def update(self, reports: Mapping[str, Progress]) -> dict[str, float | None]:
        """Take the newest report of each engine, by instance id, and return its tokens per second.

        None: there is one report so far, or its counter has begun anew. Engines that are not there are
        forgotten.
        """
        self._seen = {name: self._seen.get(name, deque()) for name in reports}
        return {name: _rate(self._seen[name], report) for name, report in reports.items()}


def _rate(seen: deque[Progress], newest: Progress) -> float | None:
    if seen and newest.generated_tokens < seen[-1].generated_tokens:
        # The core was started again.
        seen.clear()
    if not seen or newest.at - seen[-1].at >= _LEAST_S:
        seen.append(newest)
    # Two stay, however slow the reports are.
    while len(seen) > 2 and seen[-1].at - seen[0].at > _WINDOW_S:
        seen.popleft()
    if len(seen) < 2:
        return None
    return (seen[-1].generated_tokens - seen[0].generated_tokens) / (seen[-1].at - seen[0].at)


_CLASSES = common_pb2.PriorityClass.DESCRIPTOR
_STATES = engine_pb2.EngineState.DESCRIPTOR
_ROLES = engine_pb2.EngineRole.DESCRIPTOR
_BREAKERS = router_pb2.BreakerState.DESCRIPTOR
# Of several routers' breakers the one that lets the least through is shown.
_WORST = ("closed", "half_open", "open")


@dataclass(frozen=True, slots=True)
class RouterRow:
    """A router; `error` says why it is away."""

    address: str
    error: str | None
    draining: bool = False
    sessions: int = 0
    live: int = 0
    resumed: int = 0


@dataclass(frozen=True, slots=True)
class EngineRow:
    """An engine by its newest report to any of the routers; `placed` is what all of them have there."""

    instance_id: str
    name: str
    model: str
    state: str
    role: str
    breaker: str
    running: int
    waiting: int
    used_blocks: int
    total_blocks: int
    prompt_tokens: int
    cached_prompt_tokens: int
    tokens_per_s: float | None
    placed: int
    report_age_s: float


@dataclass(frozen=True, slots=True)
class LaneRow:
    """A lane of admission, added up over the routers; `oldest_wait_s` is the longest."""

    priority_class: str
    queued: int
    queued_tokens: int
    oldest_wait_s: float
    live: int
    refused: int
    timed_out: int


@dataclass(frozen=True, slots=True)
class Frame:
    """The state of the fleet at one moment."""

    routers: tuple[RouterRow, ...]
    engines: tuple[EngineRow, ...]
    lanes: tuple[LaneRow, ...]

    @property
    def complete(self) -> bool:
        """Whether every router has answered."""
        return all(router.error is None for router in self.routers)

    @property
    def tokens_per_s(self) -> float | None:
        """Of all engines whose rate is known; None if that is none."""
        known = [engine.tokens_per_s for engine in self.engines if engine.tokens_per_s is not None]
        return sum(known) if known else None


def share(part: int, whole: int) -> float | None:
    """Return part / whole within 0 .. 1, None for a share of nothing. Engines may report any numbers."""
    return min(1.0, part / whole) if whole else None


def make_frame(views: Iterable[RouterView], rates: Rates) -> Frame:
    """Bring the answers of one poll together. An engine that several routers have is one row."""
    views = tuple(views)
    seen: dict[str, list[tuple[float, router_pb2.FleetEngine]]] = {}
    lanes: dict[str, list[router_pb2.Lane]] = {}
    for view in views:
        if view.fleet is None:
            continue
        for engine in view.fleet.engines:
            reported_at = view.at - engine.report_age_ms / 1000
            seen.setdefault(engine.instance_id, []).append((reported_at, engine))
        for lane in view.fleet.lanes:
            lanes.setdefault(enum_word(_CLASSES, lane.priority_class), []).append(lane)
    newest = {name: max(seen[name], key=lambda one: one[0]) for name in seen}
    tokens_per_s = rates.update(
        {name: Progress(at, engine.load.generated_tokens) for name, (at, engine) in newest.items()}
    )
    rows = (
        _engine(engine, [one for _, one in seen[name]], tokens_per_s[name])
        for name, (_, engine) in newest.items()
    )
    return Frame(
        tuple(_router(view) for view in views),
        tuple(sorted(rows, key=lambda row: (row.name, row.instance_id))),
        tuple(_lane(name, parts) for name, parts in lanes.items()),
    )


def _router(view: RouterView) -> RouterRow:
    if view.fleet is None:
        return RouterRow(view.address, view.error)
    fleet = view.fleet
    return RouterRow(
        view.address, None, fleet.draining, fleet.sessions, fleet.live_sequences, fleet.resumed_sequences
    )


def _engine(
    newest: router_pb2.FleetEngine, everywhere: Sequence[router_pb2.FleetEngine], rate: float | None
) -> EngineRow:
    load = newest.load
    breakers = {enum_word(_BREAKERS, one.breaker) for one in everywhere}
    # A router that has seen it stall, or told it to drain, knows more than the others.
    unwell = [one.state for one in (newest, *everywhere) if one.state != engine_pb2.ENGINE_STATE_SERVING]
    return EngineRow(
        instance_id=newest.instance_id,
        name=newest.engine_name,
        model=newest.model.name,
        state=enum_word(_STATES, unwell[0] if unwell else newest.state),
        role=enum_word(_ROLES, newest.role),
        breaker=max(breakers, key=lambda name: _WORST.index(name) if name in _WORST else len(_WORST)),
        running=load.running,
        waiting=load.waiting,
        used_blocks=load.used_blocks,
        total_blocks=load.total_blocks,
        prompt_tokens=load.prompt_tokens,
        cached_prompt_tokens=load.cached_prompt_tokens,
        tokens_per_s=rate,
        placed=sum(one.placed_sequences for one in everywhere),
        report_age_s=newest.report_age_ms / 1000,
    )


def _lane(name: str, parts: Sequence[router_pb2.Lane]) -> LaneRow:
    return LaneRow(
        priority_class=name,
        queued=sum(lane.queued_sequences for lane in parts),
        queued_tokens=sum(lane.queued_tokens for lane in parts),
        oldest_wait_s=max(lane.oldest_wait_ms for lane in parts) / 1000,
        live=sum(lane.live_sequences for lane in parts),
        refused=sum(lane.refused for lane in parts),
        timed_out=sum(lane.timed_out for lane in parts),
    )
