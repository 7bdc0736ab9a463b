"""The links of all connected engines, and what they are told: what they run, and whom they are kept for."""

from __future__ import annotations

from catenary.v1 import common_pb2
from services.router.dispatch.handover import Handovers
from services.router.dispatch.health import EngineHealth
from services.router.dispatch.sequence import EngineLink, LiveSequence
from services.router.fleet import Engine


class EngineLinks:
    """Gives sequences to engines under handles of its own, and engines to sequences that need one alone."""

    def __init__(self, handovers: Handovers, health: EngineHealth) -> None:
        self._handovers = handovers
        self._health = health
        # By epoch: a link is that of one attachment.
        self._links: dict[int, EngineLink] = {}
        self._last_handle = 0

    def connect(self, engine: Engine) -> EngineLink:
        """Open the link of an engine that is attached."""
        link = self._links[engine.epoch] = EngineLink(engine)
        return link

    def of(self, engine: Engine) -> EngineLink | None:
        """The link of a connected engine."""
        return self._links.get(engine.epoch)

    def drop(self, engine: Engine) -> None:
        """The engine is gone. Idempotent."""
        self._links.pop(engine.epoch, None)

    def send(self, sequence: LiveSequence, engine: Engine) -> None:
        """Give a connected engine the sequence that was placed there."""
        link = self._links[engine.epoch]
        self._last_handle += 1
        sequence.place(link, self._last_handle)
        sequence.guard.place(engine, sequence.request.uncached_tokens)
        if not link.sequences:
            self._health.got_work(engine)
        link.sequences[sequence.engine_handle] = sequence
        leader = sequence.leader_handle()
        submit = common_pb2.Submit(
            handle=sequence.engine_handle, spec=sequence.spec, same_prompt_as=leader, alone=sequence.alone
        )
        if sequence.traceparent:
            submit.spec.traceparent = sequence.traceparent
        self._handovers.message(sequence, submit)
        link.submit(submit)
        self._handovers.sent(sequence)

    def keep(self, engine: Engine, owner: object) -> None:
        """From here on it is given nothing but `owner`, here and by other routers, which it tells that it is
        wanted empty: else it would never be."""
        engine.kept_for = owner
        if (link := self.of(engine)) is not None:
            link.keep(wanted=True)

    def give_back(self, engine: Engine) -> None:
        """Everybody may have it again."""
        engine.kept_for = None
        if (link := self.of(engine)) is not None:
            link.keep(wanted=False)
