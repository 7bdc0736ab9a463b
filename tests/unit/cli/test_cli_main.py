from __future__ import annotations

import os
import subprocess
import sys

import pytest

from catenary.cli.main import main


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("catenary 0.")


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "up" in out
    assert "chat" in out


@pytest.mark.parametrize("argv", [[], ["serve"], ["--verison"]])
def test_wrong_command_line_is_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "catenary" in captured.err


@pytest.mark.parametrize(("typed", "meant"), [("serve", "vllm-serve"), ("flet", "fleet"), ("--verison", "")])
def test_the_nearest_command_is_guessed(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([typed]) == 2
    hint = f" (did you mean {meant}?)" if meant else ""
    assert capsys.readouterr().err == f"catenary: unknown command {typed!r}{hint}; see catenary --help\n"


@pytest.mark.parametrize(
    ("argv", "option"),
    [
        (["--port", "eight"], "--port"),
        (["--engines", "0"], "--engines"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization"),
        (["--max-model-len", "-1"], "--max-model-len"),
        (["--model", ""], "--model"),
        (["--served-model-name", ""], "--served-model-name"),
        (["--api-key", ""], "--api-key"),
    ],
)
def test_bad_option_is_one_line(argv: list[str], option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["up", *argv])
    assert exit_info.value.code == 2
    err = capsys.readouterr().err
    assert option in err
    assert err.count("\n") == 1


def test_output_that_nobody_reads_is_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as nobody:
        command = [sys.executable, "-m", "catenary.cli.main", "--help"]
        done = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 141
    assert done.stderr == b""


def test_an_option_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["drain"])
    assert capsys.readouterr().err == "catenary drain: --engine is required\n"
