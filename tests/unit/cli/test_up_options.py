"""The command line of `catenary up`: of another service's option it says where that goes."""

from __future__ import annotations

import pytest

from catenary.cli.up.config import UpConfig
from catenary.config import load


def test_an_option_of_the_engine_says_how_it_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(UpConfig, ["--max-num-seqs", "8"], prog="catenary up")
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert error.count("\n") == 1
    assert error.startswith(
        "catenary up: unknown option --max-num-seqs; options of one service are variables"
    )
    assert "CATENARY_ENGINE_MAX_NUM_SEQS=8" in error


def test_help_says_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(UpConfig, ["--help"], prog="catenary up")
    assert "CATENARY_ENGINE_MAX_NUM_SEQS=8" in capsys.readouterr().out


def test_a_misspelt_option_of_its_own_is_still_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(UpConfig, ["--max-model-lem", "8"], prog="catenary up")
    assert capsys.readouterr().err == (
        "catenary up: unknown option --max-model-lem (did you mean --max-model-len?)\n"
    )
