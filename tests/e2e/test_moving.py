"""`catenary gaudi-start` and `catenary vllm-serve` start a deployment that answers. Engines are scripted."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.service_process import clean_environment
from tests.support.up import Up, descendants

pytestmark = pytest.mark.model

START_S = 150.0
STOP_S = 30.0


def ask_and_stop(up: Up) -> None:
    """Ask once and end it in order."""
    answer = up.ask(max_tokens=2, model="demo", messages=[{"role": "user", "content": "Hello"}])
    assert answer.status_code == 200, answer.text
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(STOP_S) == 0


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A chat template of few words: a scripted engine knows no special tokens."""
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0]['content'] }}")
    return file


@pytest.fixture
def started() -> Iterator[list[Up]]:
    ups: list[Up] = []
    yield ups
    for up in ups:
        up.close()


def test_gaudi_start(tmp_path: Path, template: Path, started: list[Up]) -> None:
    extra = f"--chat-template {template} --served-model-name demo --device cpu --trust-remote-code"
    words = ("-w", "smollm2", "-x", "1000", "-b", "4", "-s", "-c", str(tmp_path / "recipes"), "-e", extra)
    environment = {"CATENARY_ENGINE_SCRIPT": "default", "VLLM_USE_V1": "0", "CATENARY_ENGINE_MODLE": "x"}
    up = Up(tmp_path, *words, command="gaudi-start", **environment)
    started.append(up)
    up.line_with("ready in", START_S)
    ask_and_stop(up)
    said = "\n".join(up.lines)
    assert "warning: --trust-remote-code has no effect" in said
    assert "warning: VLLM_USE_V1 has no effect" in said
    assert "(did you mean CATENARY_ENGINE_MODEL?)" in said
    (line,) = (line for line in up.lines if line.startswith("this is: "))
    assert "CATENARY_ENGINE_MAX_NUM_SEQS=4" in line
    # The port is the environment's: the script's own default gives way.
    assert "--gpu-memory-utilization 0.9 --host 127.0.0.1 --max-model-len 1024" in line
    assert "--port" not in line
    assert (tmp_path / "recipes").is_dir()
    engine_log = (tmp_path / "logs" / "engine-0.log").read_text()
    assert "VLLM_USE_V1 has no effect" in engine_log


def test_vllm_serve(tmp_path: Path, template: Path, started: list[Up]) -> None:
    words = f"smollm2 --chat-template {template} --served-model-name demo --max-model-len 1k -tp 1 -dp 2"
    up = Up(tmp_path, *words.split(), command="vllm-serve", CATENARY_ENGINE_SCRIPT="default")
    started.append(up)
    up.line_with("ready in", START_S)
    commands = descendants(up.process.pid).values()
    engines = [command for command in commands if "catenary_testing.engine" in command]
    assert len(engines) == 2
    assert all("--max-model-len 1000" in command for command in engines)
    ask_and_stop(up)


@pytest.mark.parametrize(
    ("command", "words", "text"),
    [
        (
            "gaudi-start",
            "-w smollm2 -t 8",
            "catenary gaudi-start: -t 8: an engine on several cards is not done",
        ),
        ("vllm-serve", "smollm2 -q inc", "catenary vllm-serve: -q inc: quantized models are not done yet"),
        ("vllm-serve", "--port 1", "catenary vllm-serve: a model is missing"),
    ],
)
def test_what_is_refused_is_one_line(command: str, words: str, text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "catenary_apps.cli.main", command, *words.split()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=clean_environment(),
    )
    assert done.returncode == 2
    assert done.stderr.startswith(text)
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
