"""The gateway as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.gateway import MODEL, Stack
from tests.support.http import Connection, call, request_bytes
from tests.support.starts import Starts
from tests.support.waiting import eventually

COMMAND = [sys.executable, "-m", "gateway"]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_it_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, gateway, gateway.__main__\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "bad = {'torch', 'transformers', 'numpy', 'services'} & loaded\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_help_lists_every_option() -> None:
    done = run("--help")
    assert done.returncode == 0
    for flag in ("--port", "--api-key-file", "--tokenizer", "--max-body-mib", "CATENARY_GATEWAY_PORT"):
        assert flag in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "x"], "--port"),
        (["--prot", "1"], "--prot"),
        (["--port", "70000"], "--port"),
        (["--ssl-certfile", "/nope"], "ssl-keyfile"),
        (["--ssl-certfile", "/nope", "--ssl-keyfile", "/nope"], "--ssl-certfile"),
        (["--api-key-file", "/nope"], "--api-key-file"),
        (["--api-key", ""], "--api-key"),
        (["--api-key", "sk-one", "--api-key", ""], "--api-key"),
        (["--router", "no address"], "--router"),
        (["--client-secret-file", "/nope"], "client"),
        (["--tls-ca", "/nope"], "tls_ca"),
        (["--tls-cert", "/nope"], "tls-key"),
        (["--host", "a..b"], "--host"),
        (["--host", "256.1.1.1"], "--host"),
    ],
)
def test_bad_options_are_named_in_one_line(starts: Starts, flags: list[str], words: str) -> None:
    done = starts.run("gateway", *flags)
    assert done.returncode in (1, 2)
    lines = [line for line in done.stderr.splitlines() if line[:2] != "20"]
    assert len(lines) == 1, done.stderr
    assert words in lines[0]
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_named_in_one_line(starts: Starts) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = starts.run("gateway", "--port", str(port))
    assert done.returncode == 1
    assert "in use" in done.stderr
    assert "Traceback" not in done.stderr


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


async def status_of(address: str, path: str) -> int:
    try:
        return (await call(address, "GET", path)).status
    except OSError:
        return 0


async def ready(address: str) -> None:
    async with asyncio.timeout(30):
        while await status_of(address, "/ready") != 200:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)


@contextmanager
def gateway_process(log: Path, *flags: str, within: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen([*within, *COMMAND, *flags], stdout=output, stderr=output)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.mark.advisory("CVE-2024-9606")
async def test_it_serves_in_little_memory_and_drains_on_sigterm(stack: Stack, run_dir: Path) -> None:
    port, log, config = free_port(), run_dir / "gateway.log", stack.gateway.config
    flags = [
        "--port",
        str(port),
        "--router",
        ",".join(config.router),
        "--tokenizer",
        ",".join(config.tokenizer),
    ]
    flags += ["--client-secret-file", str(config.client_secret_file), "--drain-s", "5"]
    keys = run_dir / "keys"
    keys.write_text("sk-of-the-operator\n")
    flags += ["--api-key-file", str(keys), "--log-level", "debug"]
    headers = {"Authorization": "Bearer sk-of-the-operator"}
    address = f"http://127.0.0.1:{port}"
    with gateway_process(log, *flags) as process:
        await ready(address)
        wrong = {"Authorization": "Bearer sk-of-a-stranger"}
        assert (await call(address, "GET", "/v1/models", None, wrong)).status == 401
        body = {"model": MODEL, "prompt": "secret-prompt", "max_tokens": 200, "stream": True, "n": 4}
        for _ in range(3):
            assert (await call(address, "POST", "/v1/completions", body, headers)).events[-1] == "[DONE]"
        memory = resident_mib(process.pid)
        sys.stdout.write(f"resident: {memory:.0f} MiB\n")
        assert memory < 150
        stack.faults.step_delay_s = 0.01
        job = asyncio.create_task(call(address, "POST", "/v1/completions", {**body, "n": 1}, headers))
        await eventually(lambda: stack.engine.app.frontend.load().running, "a running sequence")
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            while await status_of(address, "/ready") != 503:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
        # The time of drain-notice-s: clients go elsewhere, and none is refused.
        late = await call(address, "POST", "/v1/completions", {**body, "n": 1, "max_tokens": 2}, headers)
        assert (late.status, late.headers["connection"]) == (200, "close")
        assert (await job).events[-1] == "[DONE]"
        assert await asyncio.to_thread(process.wait, 20) == 0
    written = log.read_text()
    assert not [one for one in ("secret-prompt", "sk-of-the-operator", "sk-of-a-stranger") if one in written]


async def test_few_descriptors_refuse_connections_and_say_so(run_dir: Path) -> None:
    port, log = free_port(), run_dir / "gateway.log"
    address = f"http://127.0.0.1:{port}"
    few = ("bash", "-c", 'ulimit -n 64; exec "$@"', "few")
    with gateway_process(
        log, "--port", str(port), "--state-dir", str(run_dir / "state"), within=few
    ) as process:
        async with asyncio.timeout(30):
            while await status_of(address, "/live") != 200:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
        held = []
        for _ in range(64):
            held.append(await Connection.to(address))
            await held[-1].send(request_bytes("GET", "/live"))
            answer = await asyncio.wait_for(held[-1].answer(), 10)
            if answer.status != 200:
                break
        assert (answer.status, answer.json()["error"]["code"]) == (503, "too_many_connections")
        assert "limit of 64 open file descriptors" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"] == "1"
        for _ in range(20):
            assert await status_of(address, "/live") in (503, 0)
        for connection in held:
            connection.close()
        async with asyncio.timeout(10):
            while await status_of(address, "/live") != 200:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
        process.terminate()
        assert await asyncio.to_thread(process.wait, 20) == 0
    assert log.read_text().count("new connections are refused") == 1
