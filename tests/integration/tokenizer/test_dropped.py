"""Tokenizer services that are gone, that their name knows no more, or that freeze: what becomes of calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from catenary.rpc import open_channel, refuse
from catenary.rpc.errors import ERROR_TRAILER
from catenary.v1 import common_pb2, tokenizer_pb2_grpc
from catenary.v1 import tokenizer_pb2 as pb
from gateway.errors import ApiError
from gateway.text.pool import TokenizerPool
from tests.support.waiting import eventually

NAME = "tokenizers.test:7071"
REQUEST = pb.TokenizeRequest(text="a")


class Service(tokenizer_pb2_grpc.TokenizerServiceServicer, health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Serves as long as it is told to; what it is to tokenize waits."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.serving = True
        self.asked = 0
        self.tenants: list[str] = []
        self.answer = asyncio.Event()
        self.failing = False
        self.overdue = False
        self.thawed = asyncio.Event()
        self.thawed.set()

    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        await self.thawed.wait()
        status = health_pb2.HealthCheckResponse.ServingStatus
        return health_pb2.HealthCheckResponse(status=status.SERVING if self.serving else status.NOT_SERVING)

    async def ListTokenizers(self, request: Any, context: Any) -> pb.ListTokenizersResponse:
        return pb.ListTokenizersResponse()

    async def Tokenize(self, request: Any, context: Any) -> pb.TokenizeResponse:
        self.asked += 1
        self.tenants.append(request.tenant)
        if self.overdue:
            error = refuse(common_pb2.ERROR_CODE_TIMEOUT, "the service's own limit")
            context.set_trailing_metadata(((ERROR_TRAILER, error.error.SerializeToString()),))
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "late")
        await self.answer.wait()
        if self.failing:
            self.failing = False
            await context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        return pb.TokenizeResponse(token_ids=[self.number])


class Fleet:
    """Services of one name, a pool that asks them, and the channels that it dialled."""

    def __init__(
        self,
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        wait_s: float = 0.2,
        render_timeout_s: float = 20,
    ) -> None:
        self.services = [Service(number) for number in range(2)]
        self.named = {f"127.0.0.{number}:7071": number for number in range(2)}
        self.channels: dict[int, grpc.aio.Channel] = {}
        self._directory = directory
        monkeypatch.setattr("catenary.rpc.resolving._LOOK_UP_S", 0.02)
        monkeypatch.setattr("catenary.rpc.resolving._LOOK_UP_ALONE_S", 0.02)
        self.pool = TokenizerPool(
            [NAME],
            self._dial,
            render_timeout_s=render_timeout_s,
            wait_s=wait_s,
            silence_s=0.25,
            max_message_mib=1,
            look_up=self._look_up,
        )

    def _socket(self, number: int) -> str:
        return f"unix:{self._directory}/{number}.sock"

    async def _look_up(self, _name: str) -> Sequence[str]:
        return tuple(self.named)

    def _dial(self, address: str, _name: str) -> grpc.aio.Channel:
        number = self.named[address]
        self.channels[number] = open_channel(self._socket(number), secret=None)
        return self.channels[number]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Fleet]:
        """Serve, and watch."""
        async with AsyncExitStack() as stack:
            for service in self.services:
                server = grpc.aio.server()
                tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(service, server)
                health_pb2_grpc.add_HealthServicer_to_server(service, server)
                server.add_insecure_port(self._socket(service.number))
                await server.start()
                stack.push_async_callback(server.stop, None)
            watching = asyncio.create_task(self.pool.run())
            try:
                await eventually(lambda: sum(target.prompt for target in self.pool.targets.all) == 2, "both")
                yield self
            finally:
                watching.cancel()
                await asyncio.wait({watching})
                await self.pool.close()

    async def lose(self, number: int) -> None:
        """One does not answer, and its name forgets it."""
        left = len(self.pool.targets.all) - 1
        self.services[number].serving = False
        del self.named[f"127.0.0.{number}:7071"]
        await eventually(lambda: len(self.pool.targets.all) == left, "the drop of one")

    async def tokenizing(self) -> tuple[asyncio.Task[list[int]], int, int]:
        """A call under way, at whom, and who else there is."""
        call = asyncio.create_task(self.pool.tokenize(REQUEST))
        await eventually(lambda: sum(service.asked for service in self.services) == 1, "the call")
        busy = next(service.number for service in self.services if service.asked)
        return call, busy, 1 - busy

    def closed(self, number: int) -> bool:
        """Whether a channel is."""
        return self.channels[number].get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_calls_under_way_go_on_at_a_service_that_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Fleet(tmp_path, monkeypatch).running() as fleet:
        call, busy, other = await fleet.tokenizing()
        await fleet.lose(busy)
        fleet.services[other].answer.set()
        assert await fleet.pool.tokenize(REQUEST) == [other]
        assert not fleet.closed(busy)
        fleet.services[busy].answer.set()
        assert await call == [busy]
        await eventually(lambda: fleet.closed(busy), "the end of its channel")


async def test_a_call_that_fails_there_is_made_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Fleet(tmp_path, monkeypatch).running() as fleet:
        call, busy, other = await fleet.tokenizing()
        await fleet.lose(busy)
        fleet.services[busy].failing = True
        fleet.services[busy].answer.set()
        fleet.services[other].answer.set()
        assert await call == [other]


async def test_nobody_is_asked_again_at_one_that_was_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Fleet(tmp_path, monkeypatch).running() as fleet:
        call, busy, other = await fleet.tokenizing()
        await fleet.lose(other)
        await eventually(lambda: fleet.closed(other), "the end of its channel")
        fleet.services[busy].failing = True
        fleet.services[busy].answer.set()
        assert await call == [busy]
        fleet.services[busy].answer.clear()
        last = asyncio.create_task(fleet.pool.tokenize(REQUEST))
        await eventually(lambda: fleet.services[busy].asked == 3, "another call")
        await fleet.lose(busy)
        fleet.services[busy].failing = True
        fleet.services[busy].answer.set()
        with pytest.raises(ApiError) as away:
            await last
        assert (away.value.status, fleet.services[other].asked) == (503, 0)


async def test_calls_at_a_service_that_freezes_are_made_at_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Fleet(tmp_path, monkeypatch).running() as fleet:
        call, busy, other = await fleet.tokenizing()
        fleet.services[other].answer.set()
        fleet.services[busy].thawed.clear()
        assert await call == [other]
        assert await fleet.pool.tokenize(REQUEST) == [other]


async def test_requests_wait_for_a_service_and_are_refused_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Fleet(tmp_path, monkeypatch, wait_s=20).running() as fleet:
        call, busy, _ = await fleet.tokenizing()
        for service in fleet.services:
            service.thawed.clear()
        await eventually(lambda: not fleet.pool.answering, "two frozen services")
        late = asyncio.create_task(fleet.pool.tokenize(REQUEST))
        fleet.services[busy].answer.set()
        fleet.services[busy].thawed.set()
        assert await asyncio.gather(call, late) == [[busy], [busy]]


async def test_a_wait_for_a_service_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Fleet(tmp_path, monkeypatch, wait_s=0.2).running() as fleet:
        for service in fleet.services:
            service.thawed.clear()
        await eventually(lambda: not fleet.pool.answering, "two frozen services")
        with pytest.raises(ApiError, match=r"0\.2 seconds \(failover-wait-s\)") as away:
            await fleet.pool.tokenize(REQUEST)
        assert (away.value.status, away.value.code) == (503, "tokenizer_unavailable")
        assert away.value.retry_after_ms


async def test_a_timeout_names_the_limit_that_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Fleet(tmp_path, monkeypatch, render_timeout_s=0.3).running() as fleet:
        with pytest.raises(ApiError, match=r"within 0\.3 seconds \(render-timeout-s\)") as late:
            await fleet.pool.tokenize(REQUEST)
        assert late.value.status == 504
        for service in fleet.services:
            service.overdue = True
        with pytest.raises(ApiError, match="the service's own limit") as late:
            await fleet.pool.tokenize(REQUEST)
        assert late.value.status == 504


async def test_a_service_is_told_whose_request_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Fleet(tmp_path, monkeypatch).running() as fleet:
        for service in fleet.services:
            service.answer.set()
        request = pb.TokenizeRequest(tenant="a key's name")
        request.MergeFrom(REQUEST)
        await fleet.pool.tokenize(request)
        assert [name for service in fleet.services for name in service.tenants] == ["a key's name"]
