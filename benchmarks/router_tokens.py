"""What an output token costs the router: CPU time of its process over the tokens that a gateway received.

Run: `python -m benchmarks.router_tokens`. The router is a process of its own. This one plays the engines,
whose steps are bytes that were made before, and one gateway, which counts what comes. One step of an engine
holds one token of each of its sequences. Between two moments in which all streams run, user and system time
of the router's process, all of its threads, is divided by the tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import uvloop

import catenary.grpc_environment  # noqa: F401
from catenary.rpc import open_channel
from catenary.schema import MINIMUM_PEER_REVISION, SCHEMA_REVISION
from catenary.v1 import common_pb2, engine_pb2, router_pb2
from tests.support.secrets import TestSecrets
from tests.support.service_process import ServiceProcess

MODEL = "played"
REPORT_S = 0.5
# The repository's target, and what a bare relay of such messages took where it was set.
CASES = {
    "16 engines, 16 tokens a message": (16, 16),
    "32 engines, 64 tokens a message": (32, 64),
}


def encoded(message: Any) -> bytes:
    """Return bytes of a message that may be bytes already."""
    return message if isinstance(message, bytes) else message.SerializeToString()


class PlayedEngine:
    """An engine that says the same step again and again, as fast as `steps_per_s` asks."""

    def __init__(self, number: int, target: str, secret: str, sequences: int, steps_per_s: float) -> None:
        self._number = number
        self._sequences = sequences
        self._period_s = 1 / steps_per_s
        self._channel = open_channel(target, secret=secret)
        self._handles: list[int] = []
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Attach, take sequences, and make steps until cancelled."""
        method = self._channel.stream_stream(
            "/catenary.v1.FleetService/Attach",
            request_serializer=encoded,
            response_deserializer=engine_pb2.AttachResponse.FromString,
        )
        call: Any = method()
        await call.write(engine_pb2.AttachRequest(hello=self._hello()))
        epoch = (await call.read()).attached.lease_epoch
        writing = asyncio.Lock()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(call))
                group.create_task(self._play(call, epoch, writing))
                group.create_task(self._tell(call, epoch, writing))
        finally:
            call.cancel()
            await self._channel.close()

    async def _read(self, call: Any) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:
            if message.HasField("submit"):
                self._handles.append(message.submit.handle)
                if len(self._handles) == self._sequences:
                    self.ready.set()

    async def _tell(self, call: Any, epoch: int, writing: asyncio.Lock) -> None:
        for number in itertools.count(1):
            async with writing:
                await call.write(self._report(epoch, number))
            await asyncio.sleep(REPORT_S)

    async def _play(self, call: Any, epoch: int, writing: asyncio.Lock) -> None:
        await self.ready.wait()
        count = len(self._handles)
        step = common_pb2.StepOutput(
            handles=self._handles, token_counts=[1] * count, token_ids=[7 + n for n in range(count)]
        )
        played = engine_pb2.AttachRequest(lease_epoch=epoch, step=step).SerializeToString()
        due = time.monotonic()
        while True:
            async with writing:
                await call.write(played)
            due += self._period_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    def _report(self, epoch: int, sequence: int) -> engine_pb2.AttachRequest:
        load = engine_pb2.LoadReport(
            sequence=sequence,
            state=engine_pb2.ENGINE_STATE_SERVING,
            running=len(self._handles),
            total_blocks=1 << 20,
        )
        return engine_pb2.AttachRequest(lease_epoch=epoch, load=load)

    def _hello(self) -> engine_pb2.EngineHello:
        return engine_pb2.EngineHello(
            schema_revision=SCHEMA_REVISION,
            minimum_peer_revision=MINIMUM_PEER_REVISION,
            instance_id=f"played-{self._number}",
            engine_name=f"played-{self._number}",
            device="scripted",
            model=common_pb2.ModelInfo(name=MODEL, max_model_len=1 << 20, vocab_size=32_000, dtype="float32"),
            capacity=engine_pb2.Capacity(
                block_size=128,
                total_blocks=1 << 20,
                # Some places are kept for lanes of which no request comes here.
                max_running=2 * self._sequences,
                max_batched_tokens=8192,
            ),
            state=engine_pb2.ENGINE_STATE_SERVING,
        )


@dataclass
class Gateway:
    """One Session that submits all sequences once so many engines serve, and counts tokens and messages."""

    engines: int
    tokens: int = 0
    messages: int = 0
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, target: str, secret: str, sequences: int) -> None:
        """Submit, then read until cancelled. Raises RuntimeError for a refusal or an end."""
        channel = open_channel(target, secret=secret)
        method = channel.stream_stream(
            "/catenary.v1.RouterService/Session",
            request_serializer=encoded,
            response_deserializer=router_pb2.SessionResponse.FromString,
        )
        call = method(self._requests(sequences))
        try:
            async for response in call:
                if response.HasField("step"):
                    self.tokens += len(response.step.token_ids)
                    self.messages += 1
                    if response.step.ends:
                        raise RuntimeError(f"a sequence ended: {response.step.ends[0].error.message}")
                elif response.HasField("models"):
                    if sum(model.serving_engines for model in response.models.models) == self.engines:
                        self.complete.set()
                elif response.HasField("refusal"):
                    raise RuntimeError(response.refusal.error.message)
        finally:
            call.cancel()
            await channel.close()

    async def _requests(self, sequences: int) -> AsyncIterator[router_pb2.SessionRequest]:
        hello = router_pb2.SessionHello(
            schema_revision=SCHEMA_REVISION,
            minimum_peer_revision=MINIMUM_PEER_REVISION,
            instance_id="gateway-of-a-benchmark",
        )
        yield router_pb2.SessionRequest(hello=hello)
        await self.complete.wait()
        for handle in range(1, sequences + 1):
            spec = common_pb2.SequenceSpec(model=MODEL, token_ids=[handle % 1000] * 64)
            yield router_pb2.SessionRequest(submit=common_pb2.Submit(handle=handle, spec=spec))
        await asyncio.Event().wait()


async def measure(name: str, options: argparse.Namespace, directory: Path) -> str:
    """Return one case, as a row of the table."""
    engines, each = CASES[name]
    secrets = TestSecrets.write(directory)
    target = f"unix:{directory}/router"
    flags = (f"--listen={target}", *secrets.flags, "--placement=least_loaded")
    router = ServiceProcess("router", "services.router", flags, directory)
    router.start()
    gateway = Gateway(engines)
    played = [PlayedEngine(n, target, secrets.engine, each, options.steps_per_s) for n in range(engines)]
    try:
        async with asyncio.timeout(30):
            while not (directory / "router").exists():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        tasks = [asyncio.create_task(engine.run()) for engine in played]
        tasks.append(asyncio.create_task(gateway.run(target, secrets.client, engines * each)))
        running = asyncio.gather(*tasks)
        ready = asyncio.gather(*(engine.ready.wait() for engine in played))
        await asyncio.wait((running, ready), timeout=30, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        if not ready.done():
            raise RuntimeError("not every engine got its sequences")
        await asyncio.sleep(1.0)
        process = psutil.Process(router.pid)
        times, tokens, messages, began = (
            process.cpu_times(),
            gateway.tokens,
            gateway.messages,
            time.monotonic(),
        )
        await asyncio.wait((running,), timeout=options.seconds)
        if running.done():
            running.result()
        after, passed = process.cpu_times(), time.monotonic() - began
        spent = after.user - times.user + after.system - times.system
        tokens, messages = gateway.tokens - tokens, gateway.messages - messages
        offered = engines * each * options.steps_per_s
        running.cancel()
        await asyncio.gather(running, *tasks, return_exceptions=True)
    finally:
        router.kill()
    return (
        f"| {name} | {offered:,.0f} | {tokens / passed:,.0f} | {tokens / max(1, messages):,.0f} "
        f"| {100 * spent / passed:.0f} % | {1e6 * spent / max(1, tokens):.1f} |"
    )


async def run(options: argparse.Namespace) -> None:
    """All cases, as a table."""
    print("| case | tokens/s offered | received | tokens a message out | router CPU | microseconds a token |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in options.case or CASES:
        directory = Path(tempfile.mkdtemp(prefix="cat-"))
        try:
            print(await measure(name, options, directory), flush=True)
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--steps-per-s", type=float, default=50.0, help="steps of each engine a second")
    parser.add_argument("--case", action="append", choices=list(CASES))
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
