"""RouterService.Generate: one sequence for a plain gRPC client."""

from __future__ import annotations

from collections.abc import AsyncIterator

from catenary.rpc import RpcError
from catenary.telemetry import current_traceparent, get_logger
from catenary.v1 import common_pb2, router_pb2
from services.router.admission import Refused
from services.router.dispatch import AbortCause, Dispatcher, LiveSequence, ReaderWatch, SingleSink
from services.router.service.streams import SLOW_READER, Cut

_log = get_logger(__name__)


class GenerateCalls:
    """Carries single sequences over Generate calls."""

    def __init__(self, dispatcher: Dispatcher, watch: ReaderWatch) -> None:
        self._dispatcher = dispatcher
        self._watch = watch

    async def serve(self, request: router_pb2.GenerateRequest) -> AsyncIterator[router_pb2.GenerateResponse]:
        """One call, to its end. Whatever ends it, the sequence is not left running."""
        spec = request.spec
        if not spec.traceparent and (traceparent := current_traceparent()):
            spec.traceparent = traceparent
        sink = SingleSink()
        try:
            sequence = self._dispatcher.submit(0, spec, sink)
        except Refused as refusal:
            raise RpcError(refusal.error) from None
        cut = Cut()
        watched = self._watch.add(lambda strikes: self._not_reading(strikes, sequence, sink, cut))
        try:
            async for response in sink.messages():
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
            self._dispatcher.abandon(sequence, AbortCause.DISCONNECT)

    def _not_reading(self, strikes: int, sequence: LiveSequence, sink: SingleSink, cut: Cut) -> None:
        """First the engine is freed and the reason waits for the client; a second time, the call is cut."""
        if strikes > 1:
            cut.now()
            return
        _log.warning("client does not read; its sequence is aborted", sequence=sequence.spec.request_id)
        sink.end(0, sequence.ending(common_pb2.FINISH_REASON_ERROR, SLOW_READER))
        self._dispatcher.abandon(sequence, AbortCause.SLOW_READER)
