"""A router that does nothing but to hand sequences to one engine and note when their tokens come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import grpc

from benchmarks.overhead.sse_client import Times
from catenary.schema import SCHEMA_REVISION
from catenary.v1 import common_pb2, engine_pb2, engine_pb2_grpc

EPOCH = 1
LEASE_MS = 10_000
REPORT_MS = 500


@dataclass(slots=True)
class _Flight:
    asked: float
    done: asyncio.Future[Times]
    first: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class PlayedRouter(engine_pb2_grpc.FleetServiceServicer):
    """The router that an engine attaches to. An async context manager that listens on `target` and asks
    for `model`."""

    target: str
    model: str
    attached: asyncio.Event = field(default_factory=asyncio.Event)
    _server: grpc.aio.Server | None = None
    _flights: dict[int, _Flight] = field(default_factory=dict)
    _outbox: asyncio.Queue[engine_pb2.AttachResponse] = field(default_factory=asyncio.Queue)
    _last: int = 0

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        engine_pb2_grpc.add_FleetServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.target)
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            await self._server.stop(0)

    async def ask(self, token_ids: Sequence[int], tokens: int) -> Times:
        """Return a sequence that generates so many tokens. Raises RuntimeError if it ends in another way."""
        self._last += 1
        spec = common_pb2.SequenceSpec(
            request_id=f"direct-{self._last}",
            model=self.model,
            token_ids=token_ids,
            stopping=common_pb2.StoppingParams(max_tokens=tokens, ignore_eos=True),
        )
        flight = _Flight(time.perf_counter(), asyncio.get_running_loop().create_future())
        self._flights[self._last] = flight
        submit = common_pb2.Submit(handle=self._last, spec=spec)
        self._outbox.put_nowait(engine_pb2.AttachResponse(submit=submit))
        return await flight.done

    async def Attach(
        self,
        request_iterator: AsyncIterator[engine_pb2.AttachRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[engine_pb2.AttachResponse]:
        """See the proto."""
        await anext(request_iterator)
        terms = engine_pb2.Attached(
            schema_revision=SCHEMA_REVISION,
            router_instance_id="played",
            lease_epoch=EPOCH,
            lease_ms=LEASE_MS,
            report_interval_ms=REPORT_MS,
        )
        yield engine_pb2.AttachResponse(attached=terms)
        self.attached.set()
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while True:
                yield await self._outbox.get()
        finally:
            reader.cancel()

    async def PublishKv(
        self,
        request_iterator: AsyncIterator[engine_pb2.PublishKvRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[engine_pb2.PublishKvResponse]:
        """Take and drop cache events: nothing is placed."""
        async for request in request_iterator:
            if request.HasField("hello"):
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "nothing is placed here")
            yield engine_pb2.PublishKvResponse()

    async def _read(self, requests: AsyncIterator[engine_pb2.AttachRequest]) -> None:
        async for request in requests:
            now = time.perf_counter()
            if request.HasField("step"):
                self._step(request.step, now)
            elif request.HasField("load"):
                renewed = engine_pb2.LeaseRenewed(sequence=request.load.sequence)
                self._outbox.put_nowait(engine_pb2.AttachResponse(renewed=renewed))
            elif request.HasField("refusal"):
                flight = self._flights.pop(request.refusal.handle)
                flight.done.set_exception(RuntimeError(request.refusal.error.message))

    def _step(self, step: common_pb2.StepOutput, now: float) -> None:
        for handle, count in zip(step.handles, step.token_counts, strict=True):
            flight = self._flights[handle]
            flight.tokens += count
            if not flight.first:
                flight.first = now
        for end in step.ends:
            flight = self._flights.pop(step.handles[end.row])
            if end.reason == common_pb2.FINISH_REASON_LENGTH:
                flight.done.set_result(Times(flight.asked, flight.first, now, flight.tokens))
            else:
                flight.done.set_exception(RuntimeError(end.error.message or "it ended otherwise"))
