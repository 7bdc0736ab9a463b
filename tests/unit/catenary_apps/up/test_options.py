"""The command line of `catenary up`: of another service's option it says where that goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from catenary.config import load
from catenary_apps.cli.runtime_directory import RuntimeDirectory
from catenary_apps.up.config import UpConfig
from catenary_apps.up.models import ReadyModel
from catenary_apps.up.plan import Places, overruled, plan
from catenary_apps.up.run import DONE_FOR_ENGINES
from services.engine.vllm_variables import load_moved


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


def options_of_up(*flags: str) -> UpConfig:
    """What `catenary up` reads from these flags and the environment."""
    return load_moved(UpConfig, flags, prog="catenary up", beside="CATENARY_ENGINE_", taken=DONE_FOR_ENGINES)[
        0
    ]


def test_the_engines_variable_bounds_the_conversion_that_is_done_for_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CATENARY_ENGINE_CONVERT_TIMEOUT_S", "60")
    assert options_of_up().convert_timeout_s == 60
    assert options_of_up("--convert-timeout-s", "5").convert_timeout_s == 5
    monkeypatch.setenv("CATENARY_UP_CONVERT_TIMEOUT_S", "7")
    assert options_of_up().convert_timeout_s == 7
    monkeypatch.delenv("CATENARY_UP_CONVERT_TIMEOUT_S")
    monkeypatch.setenv("CATENARY_ENGINE_CONVERT_TIMEOUT_S", "-1")
    with pytest.raises(SystemExit) as caught:
        options_of_up()
    assert caught.value.code == 2
    assert "CATENARY_ENGINE_CONVERT_TIMEOUT_S" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value", "instead"),
    [
        ("CATENARY_GATEWAY_PORT", "9000", "give --port"),
        ("CATENARY_GATEWAY_HOST", "0.0.0.0", "give --host"),
        ("CATENARY_ENGINE_MODEL", "/my/model", "give --model"),
        ("CATENARY_TOKENIZER_MODEL_DIR", "/my/model", "give --model"),
        ("CATENARY_ENGINE_SERVED_MODEL_NAME", "mine", "give --served-model-name"),
        ("CATENARY_ENGINE_LOG_LEVEL", "debug", "give --log-level"),
        ("CATENARY_ROUTER_DRAIN_S", "3", "give --drain-s"),
        ("CATENARY_ROUTER_LISTEN", "0.0.0.0:7070", "it is chosen here"),
    ],
)
def test_a_variable_that_has_no_effect_is_named_with_the_option_for_it(
    variable: str, value: str, instead: str, tmp_path: Path
) -> None:
    places = Places((ReadyModel(Path("/models/m"), "m"),), (8000,))
    specs = plan(UpConfig(), RuntimeDirectory(tmp_path), places)
    assert overruled(specs, {variable: value}) == (f"{variable} has no effect under catenary up: {instead}",)


def test_variables_that_services_read_are_not_named(tmp_path: Path) -> None:
    places = Places((ReadyModel(Path("/models/m"), "m"),), (8000,))
    specs = plan(UpConfig(), RuntimeDirectory(tmp_path), places)
    read = {"CATENARY_ENGINE_MAX_NUM_SEQS": "8", "CATENARY_GATEWAY_KEY_REQUESTS_PER_MINUTE": "60"}
    the_same = {"CATENARY_GATEWAY_PORT": "8000", "CATENARY_ENGINE_LOG_LEVEL": ""}
    assert overruled(specs, read | the_same | {"CATENARY_UP_PORT": "9", "PATH": "/bin"}) == ()
