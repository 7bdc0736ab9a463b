"""RouterService.Generate: one sequence for a plain gRPC client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from catenary.resume import Cause, ResumePolicy
from catenary.rpc import RpcError
from catenary.telemetry import current_traceparent, get_logger
from catenary.v1 import router_pb2
from services.router.admission import Refused
from services.router.dispatch import AbortCause, Dispatcher, PlainCall, ReaderWatch
from services.router.service.streams import SLOW_READER, Cut

_log = get_logger(__name__)


class GenerateCalls:
    """Carries single sequences over Generate calls. One that loses its engine goes on on another."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        watch: ReaderWatch,
        policy: ResumePolicy,
        on_resumed: Callable[[Cause], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._watch = watch
        self._policy = policy
        self._on_resumed = on_resumed

    async def serve(self, request: router_pb2.GenerateRequest) -> AsyncIterator[router_pb2.GenerateResponse]:
        """One call, to its end. Whatever ends it, the sequence is not left running."""
        spec = request.spec
        if not spec.traceparent and (traceparent := current_traceparent()):
            spec.traceparent = traceparent
        try:
            running = PlainCall(self._dispatcher, spec, self._policy, self._on_resumed)
        except Refused as refusal:
            raise RpcError(refusal.error) from None
        cut = Cut()
        watched = self._watch.add(lambda strikes: self._not_reading(strikes, running, cut))
        try:
            async for response in running.messages():
                watched.writing()
                yield response
                watched.written()
        except Refused as refusal:
            raise RpcError(refusal.error) from None
        except GeneratorExit:
            cut.explain(SLOW_READER)
            raise
        finally:
            self._watch.remove(watched)
            running.abandon(AbortCause.DISCONNECT)

    def _not_reading(self, strikes: int, running: PlainCall, cut: Cut) -> None:
        """First the engine is freed and the reason waits for the client; a second time, the call is cut."""
        if strikes > 1:
            cut.now()
            return
        _log.warning("client does not read; its sequence is aborted", sequence=running.request_id)
        running.give_up(SLOW_READER, AbortCause.SLOW_READER)
