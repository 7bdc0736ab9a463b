"""`catenary vllm-serve` and `catenary gaudi-start` as command lines: help, refusals, options behind --."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest

from catenary_apps.migration.serve import SERVE_OPTIONS
from catenary_apps.up.launching import run_gaudi_start, run_vllm_serve

Run = Callable[[Sequence[str]], int]
DOORS = [(run_vllm_serve, ["smollm2"]), (run_gaudi_start, ["-w", "smollm2"])]


def command(run: Run, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run([*words, "--dry-run"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("this is: "))
    return line


def refusal(run: Run, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    try:
        code: object = run(words)
    except SystemExit as end:
        code = end.code
    assert code == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    return said


@pytest.mark.parametrize(("run", "words"), DOORS)
def test_options_of_catenary_up_follow_behind_two_dashes(
    run: Run, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = command(
        run, capsys, *words, "--", "--router-port", "0", "--tokenizer-port=0", "--cache-dir", "/c d"
    )
    assert "--router-port 0" in line
    assert "--tokenizer-port 0" in line
    assert "--cache-dir '/c d'" in line
    # They win over what vLLM's words ask for.
    assert "--port 9 " in f"{command(run, capsys, *words, '--', '--port', '9')} "
    assert run([*words, "--", "--dry-run", "--port", "9"]) == 0
    assert "--port 9" in capsys.readouterr().out


@pytest.mark.parametrize(("run", "words"), DOORS)
def test_what_is_no_option_of_catenary_up_is_refused(
    run: Run, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(run, capsys, *words, "--", "--router-prt", "0")
    assert "unknown option --router-prt (did you mean --router-port?)" in said


def test_an_option_of_catenary_up_in_front_says_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--router-port", "--cache-dir", "--tokenizer_port"):
        assert refusal(run_vllm_serve, capsys, "smollm2", flag, "0") == (
            f"catenary vllm-serve: {flag} is an option of catenary up: write it behind --, as in catenary "
            f"vllm-serve ... -- {flag} VALUE\n"
        )
    assert "unknown option --max-num-sqs (did you mean --max-num-seqs?)" in refusal(
        run_vllm_serve, capsys, "smollm2", "--max-num-sqs", "4"
    )
    assert "options of catenary up follow behind --" in refusal(
        run_gaudi_start, capsys, "-w", "m", "--router-port", "0"
    )


@pytest.mark.parametrize(
    ("run", "words", "parts"),
    [
        (
            run_vllm_serve,
            [],
            [
                "usage: catenary vllm-serve MODEL",
                "Model:",
                "Memory, scheduling and execution:",
                "Server and logs:",
                "  --max-num-seqs VALUE\n      --max-num-seqs of the engine\n",
                "Taken, without effect here (a warning says why):",
                "Refused, but for values that change nothing:",
                "a proxy in front does that; an empty text and / change nothing",
            ],
        ),
        (
            run_gaudi_start,
            [],
            [
                "usage: catenary gaudi-start -w MODEL",
                "  -x VALUE   [default: 16384]\n      --max-model-len, up to",
                "  -s\n      --warmup skip of the engine\n",
                "  -q VALUE\n      file of an FP8 quantization",
                "catenary vllm-serve --help",
            ],
        ),
        (run_gaudi_start, ["--r1"], ["  -l VALUE   [default: 16384]"]),
    ],
)
def test_help_is_in_groups(
    run: Run, words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for word in ("--help", "-h"):
        assert run([*words, word]) == 0
        said = capsys.readouterr().out
        for part in (*parts, "--dry-run", "-- OPTIONS", "--cache-dir"):
            assert part in said
        # No leavings of tables: empty words between commas, marks of a document, and words for a status.
        assert not re.search(r"; ,|, ,|``|`|supported:|table above", said)
        # The names of an option stay on one line.
        assert all(len(line) <= 110 for line in said.splitlines() if not line.startswith("  -"))


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    run_vllm_serve(["--help"])
    said = capsys.readouterr().out
    headings = [line for line in said.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert len(headings) == len(set(headings)) == 5
    for option in SERVE_OPTIONS:
        for name in option.names:
            assert re.search(rf"(^|[ ,]){re.escape(name)}([ ,\n])", said), name
