"""A fake engine and a fake gateway that speak the protos by hand: they can do what a real one must not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc

from catenary.rpc import open_channel
from catenary.schema import MINIMUM_PEER_REVISION, SCHEMA_REVISION
from catenary.v1 import common_pb2, engine_pb2, engine_pb2_grpc, router_pb2, router_pb2_grpc
from catenary_testing.engine.tokens import continuation
from services.router.app import Router
from services.router.config import RouterConfig

CLIENT_SECRET = "client-secret"
ENGINE_SECRET = "engine-secret"
MODEL = "scripted"
VOCAB = 1000


async def until(condition: Callable[[], Any], *, timeout_s: float = 10) -> None:
    """Wait for a condition, looking every few milliseconds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.003)


@asynccontextmanager
async def running_router(monkeypatch: Any, **options: Any) -> AsyncIterator[tuple[Router, str]]:
    """A router in this process with both secrets, and its address."""
    monkeypatch.setenv("CATENARY_CLIENT_SECRET", CLIENT_SECRET)
    monkeypatch.setenv("CATENARY_ENGINE_SECRET", ENGINE_SECRET)
    given = {"listen": ("127.0.0.1:0",), "lease_ms": 2000, "report_interval_ms": 100, **options}
    router = Router(RouterConfig(**given))
    address = (await router.start())[0]
    try:
        yield router, address
    finally:
        await router.stop()


def spec(
    tokens: list[int],
    *,
    seed: int = 7,
    max_tokens: int | None = 16,
    model: str = MODEL,
    top_logprobs: int | None = None,
) -> common_pb2.SequenceSpec:
    """A small request; without `max_tokens`, to the end of the context."""
    return common_pb2.SequenceSpec(
        model=model,
        token_ids=tokens,
        sampling=common_pb2.SamplingParams(seed=seed),
        stopping=common_pb2.StoppingParams(max_tokens=max_tokens),
        response=common_pb2.ResponseOptions(top_logprobs=top_logprobs),
    )


def expected(tokens: Sequence[int], *, seed: int = 7, max_tokens: int = 16) -> list[int]:
    """What a FakeEngine answers to `spec` of the same arguments."""
    return continuation(tokens, max_tokens, seed=seed, vocab_size=VOCAB)


class FakeEngine:
    """Attached by hand. With `auto`, it steps all its sequences together, `period_s` apart."""

    def __init__(
        self, address: str, *, name: str = "fake", instance_id: str | None = None, **hello: Any
    ) -> None:
        self.secret: str | None = hello.pop("secret", ENGINE_SECRET)
        self.max_running: int = hello.pop("max_running", 1024)
        self.total_blocks: int = hello.pop("total_blocks", 4096)
        self.auto: bool = hello.pop("auto", True)
        self.reports: bool = hello.pop("reports", True)
        self.period_s: float = hello.pop("period_s", 0.001)
        self.model_info = hello.pop("model", None) or common_pb2.ModelInfo(
            name=MODEL, max_model_len=4096, vocab_size=VOCAB, eos_token_ids=[2], dtype="float32"
        )
        self.hello_fields = {
            "schema_revision": SCHEMA_REVISION,
            "minimum_peer_revision": MINIMUM_PEER_REVISION,
            "state": engine_pb2.ENGINE_STATE_SERVING,
            **hello,
        }
        self.address = address
        self.name = name
        self.instance_id = instance_id or f"instance-{name}"
        self.refuse_with: common_pb2.Error | None = None
        self.state = engine_pb2.ENGINE_STATE_SERVING
        self.answer_aborts = True
        self.live: dict[int, common_pb2.SequenceSpec] = {}
        self.emitted: dict[int, int] = {}
        self.answers: dict[int, list[int]] = {}
        self.submitted: list[common_pb2.Submit] = []
        self.aborted: list[int] = []
        self.attached: engine_pb2.Attached | None = None
        self.renewed = 0
        self.call: Any = None
        self._writing = asyncio.Lock()
        self._reading = asyncio.Event()
        self._reading.set()
        self.reports_sent = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> FakeEngine:
        self.channel = open_channel(self.address, secret=self.secret)
        self.call = engine_pb2_grpc.FleetServiceStub(self.channel).Attach()
        # A refusal may be quicker than the write; the read tells of it.
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await self.call.write(engine_pb2.AttachRequest(hello=self.hello()))
        first: Any = await self.call.read()
        self.attached = first.attached
        self._reader = asyncio.create_task(self._read())
        if self.auto:
            self._tasks.append(asyncio.create_task(self._step_for_ever()))
        if self.reports:
            self._tasks.append(asyncio.create_task(self._report_for_ever()))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        """Drop the stream at once."""
        for task in (self._reader, *self._tasks):
            task.cancel()
        self.call.cancel()
        await self.channel.close()

    def stop_reading(self) -> None:
        """Leave everything that the router sends from here on where it is."""
        self._reading.clear()

    def hello(self) -> engine_pb2.EngineHello:
        return engine_pb2.EngineHello(
            instance_id=self.instance_id,
            engine_name=self.name,
            device="scripted",
            model=self.model_info,
            capacity=engine_pb2.Capacity(
                block_size=32, total_blocks=self.total_blocks, max_running=self.max_running, max_waiting=0
            ),
            **self.hello_fields,
        )

    async def send(self, **payload: Any) -> None:
        """Write one message under the granted epoch (or `lease_epoch`)."""
        assert self.attached is not None
        payload.setdefault("lease_epoch", self.attached.lease_epoch)
        async with self._writing:
            await self.call.write(engine_pb2.AttachRequest(**payload))

    async def report(self, **fields: Any) -> None:
        self.reports_sent += 1
        fields = {"sequence": self.reports_sent, "running": len(self.live), "total_blocks": 4096, **fields}
        await self.send(load=engine_pb2.LoadReport(state=self.state, **fields))

    async def step(self, count: int = 1) -> None:
        """`count` tokens for every live sequence, in one message."""
        output = common_pb2.StepOutput()
        for row, (handle, sequence) in enumerate(list(self.live.items())):
            done = self.emitted[handle]
            limit = sequence.stopping.max_tokens
            tokens = self.answers[handle][done : done + count]
            output.handles.append(handle)
            output.token_counts.append(len(tokens))
            output.token_ids.extend(tokens)
            self.emitted[handle] = done + len(tokens)
            if self.emitted[handle] >= limit:
                self._end(output, row, handle, common_pb2.FINISH_REASON_LENGTH)
        if output.handles:
            await self.send(step=output)

    async def _read(self) -> None:
        # The status, if the test wants it, is asked of the call.
        with suppress(grpc.aio.AioRpcError):
            await self._read_messages()

    async def _read_messages(self) -> None:
        while await self._reading.wait() and isinstance(
            message := await self.call.read(), engine_pb2.AttachResponse
        ):
            match message.WhichOneof("payload"):
                case "renewed":
                    self.renewed = message.renewed.sequence
                case "submit":
                    self.submitted.append(message.submit)
                    if self.refuse_with is not None:
                        refusal = common_pb2.Refusal(handle=message.submit.handle, error=self.refuse_with)
                        await self.send(refusal=refusal)
                    else:
                        self._accept(message.submit.handle, message.submit.spec)
                case "abort":
                    await self._abort(message.abort.handle)

    def _accept(self, handle: int, sequence: common_pb2.SequenceSpec) -> None:
        self.live[handle] = sequence
        self.emitted[handle] = 0
        self.answers[handle] = expected(
            sequence.token_ids, seed=sequence.sampling.seed, max_tokens=sequence.stopping.max_tokens
        )

    async def _abort(self, handle: int) -> None:
        self.aborted.append(handle)
        if not self.answer_aborts:
            return
        outcome = common_pb2.ABORT_OUTCOME_ALREADY_FINISHED
        if handle in self.live:
            outcome = common_pb2.ABORT_OUTCOME_ABORTED
            output = common_pb2.StepOutput(handles=[handle], token_counts=[0])
            self._end(output, 0, handle, common_pb2.FINISH_REASON_ABORT)
            await self.send(step=output)
        await self.send(abort_result=engine_pb2.AbortResult(handle=handle, outcome=outcome))

    def _end(self, output: common_pb2.StepOutput, row: int, handle: int, reason: Any) -> None:
        usage = common_pb2.Usage(
            prompt_tokens=len(self.live[handle].token_ids), completion_tokens=self.emitted[handle]
        )
        output.ends.append(common_pb2.SequenceEnd(row=row, reason=reason, usage=usage))
        del self.live[handle]

    async def _step_for_ever(self) -> None:
        while True:
            await self.step()
            await asyncio.sleep(self.period_s)

    async def _report_for_ever(self) -> None:
        assert self.attached is not None
        while True:
            await self.report()
            await asyncio.sleep(self.attached.report_interval_ms / 1000)


class FakeGateway:
    """A session whose messages are collected per handle."""

    def __init__(self, address: str, *, reading: bool = True, **hello: Any) -> None:
        self.reading = reading
        self.secret: str = hello.pop("secret", CLIENT_SECRET)
        self.hello_fields = {
            "schema_revision": SCHEMA_REVISION,
            "minimum_peer_revision": MINIMUM_PEER_REVISION,
            "instance_id": "gateway-1",
            **hello,
        }
        self.address = address
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, common_pb2.SequenceEnd] = {}
        self.refusals: dict[int, common_pb2.Error] = {}
        self.abort_results: dict[int, Any] = {}
        self.updates: list[tuple[float, router_pb2.ModelsUpdate]] = []
        self.shed: list[router_pb2.ShedState] = []
        self.steps = 0
        self.rows = 0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> FakeGateway:
        self.channel = open_channel(self.address, secret=self.secret)
        self.call: Any = router_pb2_grpc.RouterServiceStub(self.channel).Session()
        await self.call.write(router_pb2.SessionRequest(hello=router_pb2.SessionHello(**self.hello_fields)))
        first: Any = await self.call.read()
        self.welcome = first.welcome
        if self.reading:
            self.read()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        """Drop the stream at once."""
        if self._task is not None:
            self._task.cancel()
        self.call.cancel()
        await self.channel.close()

    def read(self) -> None:
        """Begin to read."""
        self._task = asyncio.create_task(self._read())

    async def submit(
        self,
        handle: int,
        sequence: common_pb2.SequenceSpec,
        same_prompt_as: int | None = None,
        **fields: Any,
    ) -> None:
        submit = common_pb2.Submit(handle=handle, spec=sequence, same_prompt_as=same_prompt_as, **fields)
        await self.call.write(router_pb2.SessionRequest(submit=submit))

    async def abort(self, handle: int) -> None:
        await self.call.write(router_pb2.SessionRequest(abort=engine_pb2.AbortSequence(handle=handle)))

    async def ended(self, *handles: int) -> None:
        """Wait for the ends (or refusals) of sequences."""
        await until(lambda: all(handle in self.ends or handle in self.refusals for handle in handles))

    def serving(self) -> int:
        """Engines that serve, by the last update."""
        return (
            self.updates[-1][1].models[0].serving_engines
            if self.updates[-1:] and self.updates[-1][1].models
            else 0
        )

    async def _read_messages(self) -> None:
        while isinstance(message := await self.call.read(), router_pb2.SessionResponse):
            match message.WhichOneof("payload"):
                case "models":
                    self.updates.append((time.monotonic(), message.models))
                case "shed":
                    self.shed.append(message.shed)
                case "step":
                    self._step(message.step)
                case "refusal":
                    self.refusals[message.refusal.handle] = message.refusal.error
                case "abort_result":
                    self.abort_results[message.abort_result.handle] = message.abort_result.outcome

    async def _read(self) -> None:
        # The status, if the test wants it, is asked of the call.
        with suppress(grpc.aio.AioRpcError):
            await self._read_messages()

    def _step(self, step: common_pb2.StepOutput) -> None:
        self.steps += 1
        self.rows += len(step.handles)
        start = 0
        for handle, count in zip(step.handles, step.token_counts, strict=True):
            assert handle not in self.ends, "tokens after the end"
            self.tokens.setdefault(handle, []).extend(step.token_ids[start : start + count])
            start += count
        for end in step.ends:
            self.ends[step.handles[end.row]] = end
