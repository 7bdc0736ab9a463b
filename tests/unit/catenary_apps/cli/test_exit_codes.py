"""Exit codes of all commands: 2 for a wrong command line or configuration, 1 for what failed in the doing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from catenary_apps.cli.main import main
from catenary_apps.up.deployment import own_command

# A port on which nothing listens.
_NOBODY = "127.0.0.1:1"


def code_of(words: list[str]) -> object:
    try:
        return main(words)
    except SystemExit as end:
        return end.code


@pytest.fixture(autouse=True)
def _no_deployment_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "up --nonsense",
        "up --port eight",
        "up --model /nowhere",
        "up --model smollm",
        "up --task nonsense",
        "up --api-key-file /nowhere",
        "up --engine-roles prefill,decode",
        "up --port 65535 --gateways 2",
        "up --port 8999 --router-port 8999",
        "up --log-dir /proc/none",
        "chat --nonsense",
        "chat --base-url ftp://x",
        "chat --ca-file /nowhere",
        "plan --nonsense",
        "plan --model /nowhere",
        "plan --plot /nowhere/x.svg",
        "buckets --nonsense",
        "buckets --model smollm",
        "buckets --strategies best",
        "buckets --learn /nowhere/x",
        "bench",
        "bench serv",
        "bench serve --nonsense",
        "bench serve --base-url ftp://x",
        "bench serve --ca-file /nowhere",
        "bench serve --save /nowhere/x",
        "bench serve --dataset-path /nowhere --dataset lines",
        "bench throughput --save /nowhere/x",
        "top --nonsense",
        "top --router nonsense",
        "fleet --router nonsense",
        "fleet --router 127.0.0.1:1 --client-secret-file /nowhere",
        "drain",
        "drain engine-0 --router nonsense",
        "drain engine-0 --router 127.0.0.1:1 --tls-ca /nowhere",
        "profile --engine nonsense",
        "profile --output /nowhere/x --engine 127.0.0.1:1",
        "doctor --root /nowhere",
        "vllm-serve --nonsense",
        "gaudi-start --nonsense",
        "completion fish",
        "completion",
    ],
)
def test_a_wrong_command_line_ends_with_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err


@pytest.mark.parametrize(
    "line",
    [
        f"chat --base-url {_NOBODY}",
        f"bench serve --base-url {_NOBODY} --num-prompts 1 --ready-timeout-s 0 --model m",
        "top --once",
        "fleet",
        f"fleet --router {_NOBODY} --timeout 1",
        f"top --once --router {_NOBODY} --timeout 1",
        "drain engine-0",
        "profile",
    ],
)
def test_what_is_right_and_fails_ends_with_1(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(line.split()) == 1


def test_a_file_of_keys_without_one_is_told_before_anything_is_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_text("# none yet\n")
    assert code_of(["up", "--port", "0", "--router-port", "0", "--api-key-file", str(tmp_path / "keys")]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("holds no key")) == ("", 1)


@pytest.mark.parametrize(
    ("program", "on_path", "words"),
    [("catenary", True, "catenary"), ("catenary", False, "{program}"), ("main.py", False, "{python} -m ")],
)
def test_the_command_that_is_printed_is_one_that_runs(
    program: str, on_path: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / program
    file.touch(0o755)
    monkeypatch.setattr(sys, "argv", [str(file)])
    monkeypatch.setenv("PATH", str(tmp_path) if on_path else "")
    assert own_command().startswith(words.format(program=file, python=sys.executable))


def test_a_wrong_option_is_told_before_heavy_modules_load() -> None:
    lines = [
        *("--help", "nonsense", "up --modle x", "up --max-num-seq 3", "up --port eight", "up --help"),
        *("plan --nonsense", "plan --help", "chat --nonsense", "chat --help", "buckets --nonsense"),
        *("bench serve --nonsense", "bench throughput --nonsense", "top --nonsense", "fleet --nonsense"),
        *("drain --nonsense", "profile --nonsense", "doctor --nonsense", "vllm-serve --nonsense"),
        *("vllm-serve m -- --nonsense", "gaudi-start --nonsense", "completion fish"),
    ]
    heavy = {
        *("torch", "grpc", "transformers", "uvicorn", "starlette", "numpy", "httpx2", "tokenizers", "rich"),
        *("prometheus_client", "matplotlib", "huggingface_hub", "structlog", "uvloop", "google.protobuf"),
    }
    code = (
        "import sys\nfrom catenary_apps.cli.main import main\n"
        f"for line in {lines!r}:\n"
        "    try:\n        main(line.split())\n"
        "    except SystemExit:\n        pass\n"
        f"    loaded = {heavy!r} & set(sys.modules)\n"
        "    assert not loaded, (line, loaded)\n"
        "print('all', file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr.endswith("all\n"), done.stderr[-1000:]


def test_a_misspelt_variable_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CATENARY_ENGIN_X", "secret")
    hints = {
        "CATENARY_ENGINE_MAX_NUM_SEQ": "CATENARY_ENGINE_MAX_NUM_SEQS",
        "CATENARY_UP_PROT": "CATENARY_UP_PORT",
        "CATENARY_CHAT_MODLE": "CATENARY_CHAT_MODEL",
    }
    for name in hints:
        monkeypatch.setenv(name, "secret")
    told = {
        "up": {"CATENARY_ENGINE_MAX_NUM_SEQ", "CATENARY_UP_PROT", "CATENARY_ENGIN_X"},
        "plan": {"CATENARY_ENGINE_MAX_NUM_SEQ", "CATENARY_ENGIN_X"},
        "chat": {"CATENARY_CHAT_MODLE", "CATENARY_ENGIN_X"},
        "doctor": {"CATENARY_ENGIN_X"},
    }
    for command, names in told.items():
        assert code_of([command, "--nonsense"]) == 2
        *warnings, _ = capsys.readouterr().err.splitlines()
        assert {line.split()[1] for line in warnings} == names
        for line in warnings:
            assert line.startswith("warning: ")
            assert "secret" not in line
            assert hints.get(line.split()[1], "") in line
