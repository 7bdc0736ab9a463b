"""What a call brings and leaves: context, refusals, defects, limits, cancellation, metrics, the client."""

from __future__ import annotations

import asyncio
import gc
import re
import weakref
from collections.abc import AsyncIterator
from types import FrameType
from typing import Any

import grpc
import pytest
from prometheus_client import REGISTRY

from catenary.client import AsyncClient
from catenary.rpc import RpcError, error_of, interceptor, open_channel, refuse
from catenary.telemetry import bind_request
from catenary.v1 import common_pb2, router_pb2, router_pb2_grpc
from tests.support.rpc_fakes import TOKENIZER, FakeRouter, RunningServer, serving
from tests.support.waiting import eventually

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def connect(running: RunningServer, **options: Any) -> grpc.aio.Channel:
    return open_channel(running.target, secret="client-secret", **options)


async def failure_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async with asyncio.timeout(10):
            await call
    return error.value


def handled(method: str, code: str) -> float:
    labels = {"method": method, "code": code}
    return REGISTRY.get_sample_value("catenary_rpc_server_handled_total", labels) or 0.0


async def test_request_id_and_trace_go_along() -> None:
    async with serving() as running, connect(running) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        with bind_request("req-7", TRACE):
            seen = (await stub.GetFleet(router_pb2.GetFleetRequest())).router_instance_id
        name, trace = seen.split(" ")
        assert name == "req-7"
        assert trace.startswith("00-0af7651916cd43dd8448eb211c80319c-")
        assert trace != TRACE


@pytest.mark.parametrize("value", ["", "two words", "x" * 200, "a;b<c>"])
async def test_an_odd_request_id_is_replaced(value: str) -> None:
    async with serving() as running, connect(running) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        metadata = (("x-request-id", value), ("traceparent", "nonsense"))
        answer = await stub.GetFleet(router_pb2.GetFleetRequest(), metadata=metadata)
        assert re.fullmatch(r"rpc-[0-9a-f]{32} 00-[0-9a-f]{32}-[0-9a-f]{16}-01", answer.router_instance_id)


async def test_a_refusal_makes_the_round_trip() -> None:
    async with serving() as running, connect(running) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        refusal = refuse(
            common_pb2.ERROR_CODE_OVERLOADED,
            "The queue of 8 sequences is full \u2013 try later.",
            param="n",
            retryable=True,
            retry_after_ms=250,
        )
        running.router.failure = refusal
        unary = await failure_of(stub.ListModels(router_pb2.ListModelsRequest()))
        streamed = await failure_of(stub.Generate(router_pb2.GenerateRequest()).read())
        for error in (unary, streamed):
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error_of(error) == refusal.error


async def test_a_refusal_with_long_texts_still_arrives() -> None:
    async with serving() as running, connect(running) as channel:
        running.router.failure = refuse(
            common_pb2.ERROR_CODE_INVALID_ARGUMENT, "x" * 100_000, param="y" * 100_000
        )
        stub = router_pb2_grpc.RouterServiceStub(channel)
        error = error_of(await failure_of(stub.ListModels(router_pb2.ListModelsRequest())))
        assert error.code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
        assert error.message == "x" * 1000


class Large:
    """What a handler holds in its frame."""


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("defect", [False, True])
async def test_a_failed_call_holds_nothing_until_the_garbage_collector_comes(
    monkeypatch: pytest.MonkeyPatch, streamed: bool, defect: bool
) -> None:
    held: list[weakref.ref[Large]] = []
    in_frames = 0

    def queue(large: Large) -> None:
        raise TimeoutError

    def fail(large: Large) -> Exception:
        held.append(weakref.ref(large))
        try:
            queue(large)
        except TimeoutError:
            if defect:
                raise ValueError from None
            raise refuse(common_pb2.ERROR_CODE_OVERLOADED, "full") from None
        raise AssertionError

    async def unary(self: Any, request: Any, context: Any) -> None:
        large = Large()
        fail(large)

    async def stream(self: Any, request: Any, context: Any) -> AsyncIterator[None]:
        large = Large()
        yield router_pb2.GenerateResponse()  # type: ignore[misc]
        fail(large)

    # The log of an unconfigured structlog holds on to what it prints.
    monkeypatch.setattr(interceptor.log, "exception", lambda *args, **fields: None, raising=False)
    monkeypatch.setattr(FakeRouter, "ListModels", unary)
    monkeypatch.setattr(FakeRouter, "Generate", stream)
    async with serving() as running, connect(running) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                if streamed:
                    call = stub.Generate(router_pb2.GenerateRequest())
                    await call.read()
                    await failure_of(call.read())
                else:
                    await failure_of(stub.ListModels(router_pb2.ListModelsRequest()))
            await eventually(lambda: running.server.calls.in_flight == 0, "the calls have left")
            await eventually(lambda: not any(large() for large in held), "nothing is held")
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            in_frames = sum(
                isinstance(thing, FrameType) and "request" in thing.f_locals for thing in gc.garbage
            )
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert len(held) == 3
    assert in_frames == 0


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_defect_is_internal_with_a_fixed_text(streamed: bool) -> None:
    async with serving() as running, connect(running) as channel:
        running.router.failure = ValueError("/srv/models/secret-path at 10.0.0.7")
        stub = router_pb2_grpc.RouterServiceStub(channel)
        if streamed:
            spec = common_pb2.SequenceSpec(token_ids=[1, 2])
            call = stub.Generate(router_pb2.GenerateRequest(spec=spec))
            deltas: list[Any] = [await call.read(), await call.read()]
            assert [list(delta.token_ids) for delta in deltas] == [[1], [2]]
            error = await failure_of(call.read())
        else:
            error = await failure_of(stub.ListModels(router_pb2.ListModelsRequest()))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert error_of(error).code == common_pb2.ERROR_CODE_INTERNAL
        assert "secret-path" not in f"{error.details()} {error.trailing_metadata()}"
        assert (
            error.details()
            == error_of(error).message
            == ("The service failed to answer because of an internal error.")
        )


async def test_an_oversized_message_is_resource_exhausted_and_named() -> None:
    async with (
        serving(max_message_mib=1) as running,
        connect(running, max_message_mib=4) as wide,
        connect(running, max_message_mib=1) as narrow,
    ):
        request = router_pb2.GenerateRequest(spec=common_pb2.SequenceSpec(model="x" * (2 << 20)))
        for channel in (wide, narrow):
            stub = router_pb2_grpc.RouterServiceStub(channel)
            error = await failure_of(stub.Generate(request).read())
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error_of(error).code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
            assert not error_of(error).retryable
            # The connection and its neighbours go on.
            assert await stub.GetFleet(router_pb2.GetFleetRequest())


GARBAGE = b"\xff\xff\xff"


@pytest.mark.parametrize("method", ["GetFleet", "Generate"])
async def test_a_request_that_cannot_be_read_is_an_invalid_argument(method: str, caplog: Any) -> None:
    async with serving() as running, connect(running) as channel:
        path = f"/catenary.v1.RouterService/{method}"
        before = handled(path, "INVALID_ARGUMENT")
        if method == "GetFleet":
            unary: Any = channel.unary_unary(path)
            error = await failure_of(unary(GARBAGE))
        else:
            streamed: Any = channel.unary_stream(path)
            error = await failure_of(streamed(GARBAGE).read())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error_of(error).code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
        assert error.details() == error_of(error).message
        assert "cannot be read" in error_of(error).message
    # The caller may know before the server has counted it.
    assert handled(path, "INVALID_ARGUMENT") == before + 1
    assert "Traceback" not in caplog.text
    assert "DecodeError" not in caplog.text


async def test_a_message_that_cannot_be_read_ends_its_stream(caplog: Any) -> None:
    async with serving() as running, connect(running) as channel:
        call: Any = channel.stream_stream("/catenary.v1.RouterService/Session")()
        good = router_pb2.SessionRequest(submit=common_pb2.Submit(handle=7))
        await call.write(good.SerializeToString())
        assert router_pb2.SessionResponse.FromString(await call.read()).refusal.handle == 7
        await call.write(GARBAGE)
        error = await failure_of(call.read())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error_of(error).code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
        # The connection and its neighbours go on.
        stub = router_pb2_grpc.RouterServiceStub(channel)
        assert await stub.GetFleet(router_pb2.GetFleetRequest())
    assert "Traceback" not in caplog.text


async def test_streams_work_both_ways() -> None:
    async with serving() as running, connect(running) as channel:
        call = router_pb2_grpc.RouterServiceStub(channel).Session()
        for handle in range(100):
            await call.write(router_pb2.SessionRequest(submit=common_pb2.Submit(handle=handle)))
            answer = await call.read()
            assert isinstance(answer, router_pb2.SessionResponse)
            assert answer.refusal.handle == handle
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_a_cancelled_call_closes_its_generator_and_counts() -> None:
    method = "/catenary.v1.RouterService/Generate"
    before = handled(method, "CANCELLED")
    async with serving() as running, connect(running) as channel:
        spec = common_pb2.SequenceSpec(model="endless", token_ids=[1])
        call = router_pb2_grpc.RouterServiceStub(channel).Generate(router_pb2.GenerateRequest(spec=spec))
        await call.read()
        await asyncio.wait_for(running.router.started.wait(), 10)
        assert running.server.calls.in_flight == 1
        call.cancel()
        await asyncio.wait_for(running.router.closed.wait(), 10)
        await eventually(lambda: running.server.calls.in_flight == 0, "the call has left")
        assert handled(method, "CANCELLED") == before + 1


async def test_a_reader_that_vanishes_while_it_is_written_to_is_a_cancel() -> None:
    async with serving() as running:
        channel = connect(running)
        spec = common_pb2.SequenceSpec(model="endless", token_ids=range(200_000))
        call = router_pb2_grpc.RouterServiceStub(channel).Generate(router_pb2.GenerateRequest(spec=spec))
        await call.read()
        await channel.close()
        await asyncio.wait_for(running.router.closed.wait(), 10)
        await eventually(lambda: running.server.calls.in_flight == 0, "the call has left")


async def test_labels_are_a_closed_set() -> None:
    async with serving() as running, connect(running) as channel:
        for index in range(20):
            invented: Any = channel.unary_unary(f"/catenary.v1.RouterService/Invented{index}")
            await failure_of(invented(b""))
    labels = {
        sample.labels["method"]
        for metric in REGISTRY.collect()
        if metric.name.startswith("catenary_rpc_server")
        for sample in metric.samples
    }
    assert not any("Invented" in label for label in labels)
    assert handled("unknown", "UNIMPLEMENTED") >= 20


async def test_the_client() -> None:
    async with (
        serving() as running,
        AsyncClient(running.target, secret="client-secret", tokenizer=running.target) as client,
    ):
        deltas = [list(delta.token_ids) async for delta in client.generate([7, 8, 9], model="m", seed=1)]
        assert deltas == [[7], [8], [9]]
        running.router.release.set()
        assert [model.serving_engines for model in await client.models()] == [1]
        assert (await client.fleet()).router_instance_id
        ids = await client.render_chat([{"role": "user", "content": "hi"}], model="m")
        assert await client.detokenize(ids, model="m") == "user:hi;"
        assert await client.tokenize("ab", model="m") == (97, 98)
        data, digest = await client.tokenizer_file()
        assert data == TOKENIZER
        assert len(digest.sha256) == 64
        with pytest.raises(ValueError, match="checksum"):
            await client.tokenizer_file(model="cut")
        assert await client.render_chat("hi", model="m") == ids
        parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        assert await client.render_chat(parts, model="m") == ids
        with pytest.raises(RpcError) as refused:
            await client.render_chat([], model="m")
        assert refused.value.error.param == "messages"
        running.router.failure = refuse(common_pb2.ERROR_CODE_MODEL_NOT_FOUND, "No engine serves it.")
        with pytest.raises(RpcError) as missing:
            async for _ in client.generate([1], model="m"):
                pass
        assert missing.value.error.code == common_pb2.ERROR_CODE_MODEL_NOT_FOUND


async def test_leaving_the_clients_iteration_aborts() -> None:
    async with serving() as running, AsyncClient(running.target, secret="client-secret") as client:
        stream = client.generate([1], model="endless")
        assert await anext(stream)
        await asyncio.wait_for(running.router.started.wait(), 10)
        await stream.aclose()
        await asyncio.wait_for(running.router.closed.wait(), 10)
        with pytest.raises(ValueError, match="without a tokenizer"):
            await client.tokenize("x", model="m")


async def test_a_service_that_is_away_is_unavailable_and_the_client_says_where_it_looked() -> None:
    addresses: dict[str, Any] = {"secret": "client-secret", "tokenizer": "127.0.0.1:2", "max_retries": 0}
    async with AsyncClient("127.0.0.1:1", **addresses) as client:
        for call, port in ((client.models(), 1), (client.tokenize("x", model="m"), 2)):
            with pytest.raises(RpcError) as away:
                await call
            assert away.value.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
            assert away.value.error.retryable
            assert str(away.value) == f"The service at 127.0.0.1:{port} cannot be reached."
        with pytest.raises(RpcError, match=r"The service at 127\.0\.0\.1:1 cannot be reached"):
            await anext(client.generate([1], model="m"))


@pytest.mark.parametrize(("secret", "hint"), [("wrong", ""), (None, " None was given")])
async def test_a_secret_that_is_refused_names_the_service(secret: str | None, hint: str) -> None:
    async with (
        serving() as running,
        AsyncClient(running.target, secret=secret, tokenizer=running.target) as client,
    ):
        for call in (client.models(), client.tokenize("x", model="m"), client.tokenizer_file(model="m")):
            with pytest.raises(RpcError) as refused:
                await call
            expected = f"The service at {running.target} refused the caller's secret.{hint}"
            assert str(refused.value).startswith(expected)
