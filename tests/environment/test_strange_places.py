"""`catenary up` with all but its own directories read-only: in a working directory that has modules named
like its own and like libraries, with an empty home, and with a temporary directory that is mounted noexec."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import httpx2
import pytest

from services.engine.model import prepare_model
from tests.support.service_process import clean_environment
from tests.support.small_disk import SmallDisk
from tests.support.up import free_port, wait_for

NAMESPACE = ("unshare", "--mount", "--propagation", "private")
# Everything but what is mounted below, device files and the like is read-only from then on.
READ_ONLY = 'mount -o remount,bind,ro / && exec "$@"'
FOREIGN = ("json", "types", "torch", "numpy", "grpc", "services", "gateway", "catenary", "catenary_apps")
TRAP = "with open({mark!r}, 'a') as file:\n    file.write(__file__ + '\\n')\nraise SystemExit(97)\n"


@cache
def why_not() -> str:
    """The reason for which nothing can be made read-only for one process here; empty if it can be."""
    try:
        subprocess.run([*NAMESPACE, "sh", "-c", READ_ONLY, "sh", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return "no namespace of mounts can be made here: that needs root's CAP_SYS_ADMIN"
    return ""


class Places:
    """The directories of one deployment, on two disks."""

    def __init__(self, disk: Path, temporary: Path) -> None:
        self.work, self.home, self.allowed = disk / "work", disk / "home", disk / "allowed"
        self.temporary, self.mark = temporary, disk / "imported"
        for directory in (self.work, self.home, self.allowed):
            directory.mkdir()
        for name in FOREIGN:
            trap = TRAP.format(mark=str(self.mark))
            (self.work / f"{name}.py").write_text(trap)
            if name in ("services", "gateway", "catenary", "catenary_apps"):
                (self.work / f"{name}.py").unlink()
                (self.work / name).mkdir()
                (self.work / name / "__init__.py").write_text(trap)
        self._planted = self._outside()

    def _outside(self) -> set[Path]:
        return {path for root in (self.work, self.home) for path in root.rglob("*")}

    def written_outside(self) -> set[Path]:
        """New files where none may be written, and files that were left in the temporary directory.

        The lock that stands for a simulated card stays there: to remove it would race with others that wait
        for the card. torch leaves an empty directory.
        """
        left = {path for path in self.temporary.rglob("*") if path.is_file() and path.suffix != ".lock"}
        return (self._outside() - self._planted) | left


@pytest.fixture
def places(small_disk: Callable[..., SmallDisk]) -> Places:
    if reason := why_not():
        pytest.skip(reason)
    return Places(small_disk(1 << 28).path, small_disk(1 << 24, "noexec").path)


def command_line() -> list[str]:
    """What a person types: the script, else what it does."""
    script = Path(sys.executable).with_name("catenary")
    return [str(script)] if script.exists() else [sys.executable, "-P", "-m", "catenary_apps.cli.main"]


@pytest.mark.long
@pytest.mark.model
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_deployment_imports_and_writes_nothing_where_it_is_started(places: Places, device: str) -> None:
    model, port = prepare_model("smollm2"), free_port()
    names = {"--cache-dir": "cache", "--state-dir": "state", "--log-dir": "logs"}
    options = [f"{name}={places.allowed / value}" for name, value in names.items()]
    options += [f"--model={model}", f"--port={port}", f"--device={device}"]
    options += ["--router-port=0", "--tokenizer-port=0"]
    environment = clean_environment() | {
        "HOME": str(places.home),
        "TMPDIR": str(places.temporary),
        "CATENARY_ENGINE_MAX_MODEL_LEN": "256",
        "CATENARY_ENGINE_WARMUP": "skip",
    }
    environment.pop("CATENARY_CACHE", None)
    output = places.allowed / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*NAMESPACE, "sh", "-c", READ_ONLY, "sh", *command_line(), "up", *options],
            cwd=places.work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )

    def is_served() -> bool:
        assert process.poll() is None, output.read_text()
        try:
            response = httpx2.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120)
        except httpx2.TransportError:
            return False
        return response.is_success

    body = {"prompt": "Hello", "max_tokens": 2}
    try:
        wait_for(is_served, 240)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, output.read_text()
    finally:
        process.kill()
        process.wait(10)
    assert not places.mark.exists(), places.mark.read_text()
    assert places.written_outside() == set()
    assert {path.name for path in places.allowed.iterdir()} >= {"cache", "state", "logs"}
