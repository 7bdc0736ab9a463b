"""`python -m services.tokenizer` as an operator meets it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from catenary.rpc import open_channel
from catenary.v1.tokenizer_pb2_grpc import TokenizerServiceStub
from tests.support.starts import Starts
from tests.support.tiny_tokenizer import write_tiny_model
from tests.support.tokenizer_service import completion_request

COMMAND = [sys.executable, "-m", "services.tokenizer"]


def refusal(starts: Starts, *options: str, code: int = 1) -> str:
    """The one line of a start that was refused with `code`."""
    done = starts.run("services.tokenizer", *options)
    assert done.returncode == code
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_refused_starts_say_why_in_one_line(starts: Starts, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    secure = ("--insecure", "--listen", f"unix:{tmp_path}/socket")
    assert "--model-dir" in refusal(starts, code=2)
    none, file = tmp_path / "none", model / "tokenizer.json"
    said = refusal(starts, "--model-dir", str(none), *secure, code=2)
    assert f"--model-dir: {none} does not exist" in said
    said = refusal(starts, "--model-dir", str(file), *secure, code=2)
    assert f"--model-dir: {file} is not a directory" in said
    said = refusal(starts, "--model-dir", str(model), "--chat-template", str(none), *secure, code=2)
    assert f"--chat-template: {none} is not a file" in said
    (tmp_path / "empty").mkdir()
    assert "no tokenizer.json" in refusal(starts, "--model-dir", str(tmp_path / "empty"), *secure)
    bad = write_tiny_model(tmp_path / "bad", chat_template="{% for %}")
    assert "chat template is not valid" in refusal(starts, "--model-dir", str(bad), *secure)
    cut = write_tiny_model(tmp_path / "cut") / "tokenizer.json"
    cut.write_bytes(cut.read_bytes()[:5000])
    assert "cut short" in refusal(starts, "--model-dir", str(cut.parent), *secure)
    open_to_all = ("--model-dir", str(model), "--listen", f"unix:{tmp_path}/socket")
    assert "no secret" in refusal(starts, *open_to_all, code=2)
    assert "--workers" in refusal(starts, "--model-dir", str(model), *secure, "--workers", "0", code=2)


def test_a_port_in_use_is_refused_and_leaves_no_worker(starts: Starts, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert address in refusal(starts, "--model-dir", str(model), "--insecure", "--listen", address)


@contextmanager
def started(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    model = write_tiny_model(tmp_path / "model")
    command = [*COMMAND, "--model-dir", str(model), "--insecure", "--listen", "127.0.0.1:0", "--workers", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            seen = ""
            while not (found := re.search(r"127\.0\.0\.1:\d+", seen)):
                line = process.stderr.readline()
                assert line, seen
                seen += line
            yield process, found.group()
        finally:
            process.kill()


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert not alive


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with started(tmp_path) as (process, address):
        workers = psutil.Process(process.pid).children()
        assert len(workers) == 2
        async with open_channel(address, secret=None) as channel:
            assert await TokenizerServiceStub(channel).Render(completion_request("x", model=""))
        process.send_signal(number)
        assert process.wait(timeout=15) == 0
        wait_until_gone(workers)


def test_workers_end_with_a_killed_service(tmp_path: Path) -> None:
    with started(tmp_path) as (process, _):
        workers = psutil.Process(process.pid).children()
        os.kill(process.pid, signal.SIGKILL)
        wait_until_gone(workers)


def test_the_service_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, services.tokenizer.app, services.tokenizer.config\n"
        "sys.exit(', '.join({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
