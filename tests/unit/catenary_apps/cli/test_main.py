from __future__ import annotations

import os
import subprocess
import sys

import pytest

from catenary.config import ConfigError, load
from catenary_apps.cli.drain import DrainConfig
from catenary_apps.cli.main import main
from catenary_apps.up.config import UpConfig
from catenary_apps.up.run import check_services


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


@pytest.mark.parametrize(
    ("typed", "meant"), [("serve", "up"), ("run", "up"), ("flet", "fleet"), ("--verison", "")]
)
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
        command = [sys.executable, "-m", "catenary_apps.cli.main", "--help"]
        done = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 141
    assert done.stderr == b""


def test_an_option_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["drain"])
    assert capsys.readouterr().err == "catenary drain: --engine is required\n"


def test_help_of_a_command_is_that_commands_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["help", "up"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: catenary up [MODEL] [OPTIONS]")
    # Options stand in groups, and an option without a default says none.
    assert shown.index("Model:") < shown.index("Addresses:") < shown.index("Logs:")
    assert "[default: none]" not in shown


def test_a_word_without_a_flag_is_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert load(UpConfig, ["smollm2", "--port", "9"], prog="up").model == ("smollm2",)
    assert load(UpConfig, ["a=smollm2", "b=minilm"], prog="up").model == ("a=smollm2", "b=minilm")
    for words in (["smollm2", "--model", "minilm"], ["--nonsense", "smollm2"]):
        with pytest.raises(SystemExit):
            load(UpConfig, words, prog="up")
    assert capsys.readouterr().err.splitlines()[1].startswith("up: unknown option --nonsense; ")


@pytest.mark.parametrize("words", [["engine-0", "--router", "a:1"], ["--router", "a:1", "engine-0"]])
def test_the_engine_to_drain_stands_anywhere(words: list[str]) -> None:
    config = load(DrainConfig, words, prog="drain")
    assert (config.engine, config.router) == ("engine-0", "a:1")


def test_a_word_that_stands_for_nothing_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(DrainConfig, ["engine-0", "sk-secret"], prog="drain")
    assert "sk-secret" not in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("vllm-serve", "--max-model-len", "--base-url", "throughput", "--tensor-parallel-size"):
        assert word in script
    assert main(["completion", "fish"]) == 2


def test_variables_of_services_are_looked_at_before_a_model_is_prepared() -> None:
    check_services({"CATENARY_ENGINE_MAX_NUM_SEQS": "8", "CATENARY_ENGINE_ROUTER": "a:1,b:2", "HOME": "/"})
    for name, value, reason in (
        ("CATENARY_ENGINE_MAX_NUM_SEQS", "abc", "expected a whole number from 1 to"),
        ("CATENARY_ENGINE_QUANTIZATION", "fp8", "none, int8 or int4"),
        ("CATENARY_GATEWAY_MAX_N", "-1", "expected a whole number"),
    ):
        with pytest.raises(ConfigError, match=f"^{name} '{value}': .*{reason}"):
            check_services({name: value})
