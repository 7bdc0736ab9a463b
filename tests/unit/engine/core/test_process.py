"""The core as the servicer starts it: a process on a socket."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from catenary.frames import FrameBuffer
from services.engine.config import EngineConfig
from services.engine.domain import SamplingOptions
from services.engine.link import (
    CoreFailed,
    CoreProgress,
    CoreReady,
    CoreStep,
    StartCore,
    StopCore,
    SubmitSequence,
)
from services.engine.link.channel import DEFAULT_MAX_FRAME_BYTES, decode_body, encode_frame
from tests.support.torch_engine import save_tiny_model


@dataclass
class SpawnedCore:
    """A core process and our end of its link."""

    process: subprocess.Popen[bytes]
    sock: socket.socket
    buffer: FrameBuffer

    @classmethod
    def spawn(cls) -> SpawnedCore:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "services.engine.core", "--link-fd", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        ours.settimeout(120)
        return cls(process, ours, FrameBuffer(DEFAULT_MAX_FRAME_BYTES))

    def send(self, message: Any) -> None:
        self.sock.sendall(encode_frame(message, DEFAULT_MAX_FRAME_BYTES))

    def messages(self) -> Iterator[Any]:
        while data := self.sock.recv(65536):
            self.buffer.feed(data)
            yield from map(decode_body, self.buffer.take())

    def last_of_start(self) -> Any:
        """What ends the start: CoreReady or CoreFailed."""
        return next(message for message in self.messages() if not isinstance(message, CoreProgress))

    def exit_code(self) -> int:
        return self.process.wait(timeout=120)


@pytest.fixture
def core() -> Iterator[SpawnedCore]:
    spawned = SpawnedCore.spawn()
    yield spawned
    spawned.sock.close()
    spawned.process.kill()
    spawned.process.wait()


def start(core: SpawnedCore, model: Path | str, **options: Any) -> None:
    config = EngineConfig(model=str(model), device_threads=1, dtype="float32", **options)
    core.send(StartCore(config.model_dump_json().encode()))


def test_serves_until_it_is_stopped(core: SpawnedCore, tmp_path: Path) -> None:
    start(core, save_tiny_model("llama", tmp_path))
    ready = core.last_of_start()
    assert isinstance(ready, CoreReady)
    core.send(SubmitSequence(7, [3, 4], 2, SamplingOptions(temperature=0.0), 5, 0, [], True))
    tokens: list[int] = []
    for message in core.messages():
        assert isinstance(message, CoreStep)
        tokens += message.columns.token_ids
        if message.columns.ends:
            break
    assert len(tokens) == 5
    # Of all that it has loaded by now nothing is gRPC.
    mapped = Path(f"/proc/{core.process.pid}/maps").read_text()
    assert "torch" in mapped
    assert "grpc" not in mapped
    core.send(StopCore())
    assert core.exit_code() == 0


def test_ends_with_its_servicer(core: SpawnedCore, tmp_path: Path) -> None:
    start(core, save_tiny_model("llama", tmp_path))
    assert isinstance(core.last_of_start(), CoreReady)
    core.sock.close()
    assert core.exit_code() == 0


def test_ends_with_its_servicer_while_it_loads(core: SpawnedCore, tmp_path: Path) -> None:
    start(core, save_tiny_model("llama", tmp_path))
    assert isinstance(next(core.messages()), CoreProgress)
    core.sock.close()
    assert core.exit_code() == 0


def test_says_why_it_cannot_start(core: SpawnedCore, tmp_path: Path) -> None:
    start(core, tmp_path / "nothing")
    failed = core.last_of_start()
    assert isinstance(failed, CoreFailed)
    assert failed.reason == f"model directory {tmp_path / 'nothing'} does not exist"
    assert core.exit_code() == 1


@pytest.mark.parametrize("config", [b'{"block_size": "many"}', b'{"block_size": 32}'])
def test_refuses_options_that_are_of_the_wrong_type_or_missing(core: SpawnedCore, config: bytes) -> None:
    core.send(StartCore(config))
    failed = core.last_of_start()
    assert isinstance(failed, CoreFailed)
    assert "block_size" in failed.reason or "missing" in failed.reason
    assert core.exit_code() == 1


def test_preparing_a_model_imports_no_torch() -> None:
    script = "import sys, services.engine.model.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize(
    "module",
    ["services.engine.model.prepare", "services.engine.core", "services.tokenizer.workers"],
)
def test_modules_run_as_programs_without_a_warning(module: str) -> None:
    command = [sys.executable, "-W", "error", "-m", module, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
