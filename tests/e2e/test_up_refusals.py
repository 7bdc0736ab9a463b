"""What keeps `catenary up` from starting ends it with one line."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.service_process import clean_environment

pytestmark = pytest.mark.model

START_S = 150.0


def refused(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "catenary_apps.cli.main",
        "up",
        "--router-port",
        "0",
        "--tokenizer-port",
        "0",
        *options,
    ]
    environment = clean_environment() | variables
    return subprocess.run(
        command, capture_output=True, text=True, timeout=START_S, check=False, env=environment
    )


@pytest.mark.parametrize("option", ["--port", "--router-port"])
def test_port_in_use_is_one_line(option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = refused("--port", "0", option, port)
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(rf"\S+: 127.0.0.1:{port} is in use; choose another with {option}\n", done.stderr)


def test_second_of_several_ports_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = refused("--port", str(port - 1), "--gateways", "2")
    assert done.returncode == 1
    assert f":{port} is in use" in done.stderr


@pytest.mark.parametrize("kind", ["empty", "cut short"])
def test_bad_model_is_one_line(kind: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    if kind == "cut short":
        (model / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaFor')
    done = refused("--port", "0", "--model", str(model))
    assert done.returncode == 1
    assert re.fullmatch(r"[\w.]+: (?!error).+\n", done.stderr)
    assert str(model) in done.stderr
    assert done.stdout.splitlines()[1:] == [f"model: preparing {model}"]
    assert done.stdout.startswith("device ")


def test_a_model_that_is_nowhere_is_told_before_anything_is_prepared(tmp_path: Path) -> None:
    (tmp_path / "llama-8b").mkdir()
    (tmp_path / "llama-8b" / "config.json").write_text("{}")
    done = refused("--port", "0", "--model", str(tmp_path / "lama-8b"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"lama-8b does not exist (did you mean {tmp_path / 'llama-8b'}?)\n")


def test_engine_that_refuses_its_options_ends_the_start_with_its_reason(tmp_path: Path) -> None:
    # Left to the engine, since this may allow it.
    allowed = {"CATENARY_ENGINE_ALLOW_LONG_MAX_MODEL_LEN": "false"}
    done = refused("--port", "0", "--max-model-len", "99999999", "--log-dir", str(tmp_path), **allowed)
    assert done.returncode == 1
    assert "starting it again" not in done.stdout
    assert done.stderr.count("\n") == 1
    assert re.match(r"\S+: engine-0: .*max-model-len 99999999 exceeds .* \(log: \S+\)$", done.stderr)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--max-model-len 8193", "smollm2: max-model-len 8193 exceeds the model's context of 8192 tokens"),
        (
            "--device hpu",
            "--device hpu: the package habana-torch-plugin is not installed .*",
        ),
    ],
)
def test_what_an_engine_would_refuse_is_told_before_a_model_is_prepared(options: str, reason: str) -> None:
    done = refused("--port", "0", "--model", "smollm2", *options.split())
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(rf"\S+: {reason}\n", done.stderr)


@pytest.mark.parametrize("option", ["--log-dir", "--cache-dir"])
def test_directory_that_cannot_be_written_is_one_line(option: str) -> None:
    done = refused("--port", "0", option, "/proc/none")
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(rf"\S+: {option}: /proc/none\S* cannot be written: .+\n", done.stderr)
