"""How long a start takes: each service alone until it serves, and `catenary up` to its first answer.

Run: `python -m benchmarks.startup`. What is prepared once (the model's conversion, compiled bytecode) is
there: what is measured is a second start. The services start alone one after another; the engine is left to
`catenary up`, whose lines are shown with the time at which they came and the CPU time that was spent by then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

import catenary.grpc_environment  # noqa: F401
from catenary.rpc import open_channel
from tests.support.http import call
from tests.support.secrets import TestSecrets
from tests.support.service_process import ServiceProcess
from tests.support.tiny_tokenizer import write_tiny_model
from tests.support.up import free_port

POLL_S = 0.005
QUESTION = {"messages": [{"role": "user", "content": "Name the capital of France."}], "temperature": 0}


async def lives(address: str) -> bool:
    """Return whether a gateway answers."""
    try:
        return (await call(address, "GET", "/live", timeout_s=1)).status == 200
    except (OSError, EOFError, TimeoutError):
        return False


def there(target: str) -> bool:
    """Return whether a unix socket is there: to dial before would lengthen the channel's backoff."""
    return Path(target.removeprefix("unix:")).exists()


async def serves(target: str, secret: str) -> bool:
    """Return whether a gRPC service says that it lives."""
    if not there(target):
        return False
    channel = open_channel(target, secret=secret)
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=""), timeout=1.0
        )
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
    except grpc.aio.AioRpcError:
        return False
    finally:
        await channel.close()


async def seconds_until(service: ServiceProcess, ready: Callable[[], Awaitable[bool]]) -> float:
    """Start a service, wait until it is ready, and end it. Raises RuntimeError if it ends by itself."""
    began = time.perf_counter()
    service.start()
    try:
        while not await ready():
            if not service.alive:
                raise RuntimeError(service.tail())
            await asyncio.sleep(POLL_S)
        return time.perf_counter() - began
    finally:
        service.kill()


def remove_sockets(directory: Path) -> None:
    """Remove the sockets of services that were killed."""
    for socket in directory.glob("*.sock"):
        socket.unlink()


async def alone(directory: Path, repeats: int) -> None:
    """Gateway, router and tokenizer by themselves."""
    secrets = TestSecrets.write(directory)
    model = str(write_tiny_model(directory / "model"))
    port = free_port()
    client = f"--client-secret-file={secrets.client_file}"
    target = {name: f"unix:{directory}/{name}.sock" for name in ("router", "tokenizer")}
    routed = ("--router", target["router"], "--tokenizer", target["tokenizer"])
    named = ("--model-dir", model, "--served-model-name", "tiny", "--workers", "1")
    flags = {
        "gateway": ("gateway", ("--port", str(port), *routed, client)),
        "router": ("services.router", ("--listen", target["router"], *secrets.flags)),
        "tokenizer": ("services.tokenizer", ("--listen", target["tokenizer"], *named, client)),
    }
    print("| service | median s | least s |\n| --- | --- | --- |")
    for name, (module, options) in flags.items():
        times = []
        for _ in range(repeats):
            remove_sockets(directory)
            service = ServiceProcess(name, module, options, directory)
            if name == "gateway":
                times.append(await seconds_until(service, lambda: lives(f"http://127.0.0.1:{port}")))
            else:
                listen = target[name]
                times.append(await seconds_until(service, partial(serves, listen, secrets.client)))
        print(f"| {name} | {statistics.median(times):.2f} | {min(times):.2f} |", flush=True)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of all that it has started and that still lives."""
    spent = 0.0
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                spent += times.user + times.system
    return spent


async def whole(model: str) -> None:
    """`catenary up` with free ports, to the end of its first answer."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "catenary_apps.cli.main", "up", "--model", model, "--port", str(port)),
        *("--router-port", "0", "--tokenizer-port", "0"),
        stdout=asyncio.subprocess.PIPE,
    )

    def passed() -> str:
        return f"{time.perf_counter() - began:6.2f} s, {cpu_seconds(process.pid):6.2f} s of CPU"

    async def follow() -> None:
        if process.stdout is None:
            raise RuntimeError("its output is not read")
        async for line in process.stdout:
            print(f"{passed()}  {line.decode().rstrip()[:100]}", flush=True)

    async def answered() -> None:
        while not await lives(address):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        print(f"{passed()}  the gateway listens", flush=True)
        while (await call(address, "GET", "/ready", timeout_s=5)).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        print(f"{passed()}  the gateway is ready", flush=True)
        served = (await call(address, "GET", "/v1/models")).json()["data"][0]["id"]
        for tokens in (1, 16):
            body = {**QUESTION, "model": served, "max_tokens": tokens}
            answer = await call(address, "POST", "/v1/chat/completions", body, timeout_s=120)
            if answer.status != 200:
                raise RuntimeError(answer.body.decode())
            text = answer.json()["choices"][0]["message"]["content"]
            print(f"{passed()}  answer of {tokens} tokens: {json.dumps(text)}", flush=True)

    following = asyncio.create_task(follow())
    try:
        async with asyncio.timeout(300):
            await answered()
    finally:
        process.terminate()
        await process.wait()
        await following


async def run(options: argparse.Namespace, directory: Path) -> None:
    """Both parts."""
    if options.repeats:
        await alone(directory, options.repeats)
    for _ in range(options.starts):
        print(f"catenary up --model {options.model}")
        await whole(options.model)


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="starts of each service alone")
    parser.add_argument("--starts", type=int, default=2, help="starts of the whole; the first may prepare")
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="cat-", ignore_cleanup_errors=True) as directory:
        asyncio.run(run(options, Path(directory)))


if __name__ == "__main__":
    main()
