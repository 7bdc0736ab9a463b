"""The command line of `catenary up`: of another service's option it says where that goes."""

from __future__ import annotations

import pytest

from catenary.config import load
from catenary_apps.up.config import UpConfig


@pytest.mark.parametrize(
    ("flag", "variables"),
    [
        ("--max-num-seqs", "CATENARY_ENGINE_MAX_NUM_SEQS"),
        # Near --cpu-reserve, which is no help to who asks for this one.
        ("--cpu-kernels", "CATENARY_ENGINE_CPU_KERNELS"),
        ("--kv-cache-gib=1", "CATENARY_ENGINE_KV_CACHE_GIB"),
        ("--no-enable-prefix-caching", "CATENARY_ENGINE_ENABLE_PREFIX_CACHING=false"),
        ("--placement", "CATENARY_ROUTER_PLACEMENT"),
        (
            "--metrics-port",
            "CATENARY_ROUTER_METRICS_PORT or CATENARY_TOKENIZER_METRICS_PORT or CATENARY_ENGINE_METRICS_PORT",
        ),
    ],
)
def test_an_option_of_a_service_says_how_it_is_set(
    flag: str, variables: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load(UpConfig, [flag, "8"], prog="catenary up")
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        f"catenary up: unknown option {flag.split('=')[0]}; options of one service are variables: "
        f"{variables} (docs/configuration.md)\n"
    )


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


def test_an_option_that_nobody_has_says_where_to_look(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(UpConfig, ["--tensor-parallel-size", "8"], prog="catenary up")
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "docs/configuration.md" in error
    assert "catenary vllm-serve" in error
