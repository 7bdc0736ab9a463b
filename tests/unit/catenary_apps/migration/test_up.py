"""`catenary up` with vLLM's variables: its own options from them, and what its services get."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from catenary.config import EMPTY_KEY
from catenary.config import load as load_config
from catenary.runtime import StartRefused
from catenary_apps.cli.runtime_directory import RuntimeDirectory
from catenary_apps.up.config import UpConfig
from catenary_apps.up.models import ReadyModel
from catenary_apps.up.plan import GATEWAY_KEYS, ChildSpec, Places, Stage, child_environment, plan
from catenary_apps.up.run import check_places, modules_of
from gateway.config import GatewayConfig
from services.engine.vllm_variables import VARIABLES, Status, load_moved


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("VLLM_", "CATENARY_UP_", "CATENARY_ENGINE_")):
            monkeypatch.delenv(name)


def load(*flags: str) -> tuple[UpConfig, tuple[str, ...]]:
    return load_moved(UpConfig, flags, prog="catenary up", beside="CATENARY_ENGINE_")


def specs(config: UpConfig, directory: Path) -> dict[str, ChildSpec]:
    places = Places((ReadyModel(Path("/models/m"), "m"),), (8000,))
    return {spec.name: spec for spec in plan(config, RuntimeDirectory(directory), places)}


def test_variables_reach_the_engine_as_they_are(tmp_path: Path) -> None:
    passed = [
        name.replace("*", "ANY") for row in VARIABLES if row.status is Status.PASSED_ON for name in row.names
    ]
    environment = dict.fromkeys(passed, "as it is") | {"VLLM_GRAPH_RESERVED_MEM": "0.2"}
    engine = specs(load()[0], tmp_path)["engine-0"]
    assert child_environment(engine, environment).items() >= environment.items()


def test_api_key_reaches_the_gateway_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "k-one")
    config, warnings = load()
    assert (config.api_key, warnings) == (("k-one",), ())
    for spec in specs(config, tmp_path).values():
        environment = child_environment(spec, os.environ)
        assert "VLLM_API_KEY" not in environment
        assert ("k-one" in environment.values()) is (spec.stage is Stage.GATEWAY)
        assert "k-one" not in spec.command
    assert load("--api-key", "k-two")[0].api_key == ("k-two",)


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "CATENARY_UP_API_KEY"])
@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_in_the_environment_ends_the_start(
    name: str, key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, key)
    with pytest.raises(SystemExit) as end:
        load()
    assert end.value.code == 2
    assert capsys.readouterr().err == f"catenary up: {name}: {EMPTY_KEY}\n"


@pytest.mark.parametrize("name", GATEWAY_KEYS)
def test_an_empty_key_for_the_gateways_ends_the_start(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "")
    with pytest.raises(StartRefused, match=f"{name}: has an empty entry"):
        check_places(UpConfig(port=0, router_port=0, tokenizer_port=0))
    with pytest.raises(SystemExit):
        load_config(GatewayConfig, [], prog="python -m gateway")
    assert capsys.readouterr().err == f"python -m gateway: {name}: {EMPTY_KEY}\n"


def test_variables_of_both_kinds_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_GPU_MEMORY_UTILIZATION", "0.8")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    config, _ = load()
    assert (config.gpu_memory_utilization, config.log_level) == (0.8, "debug")
    # The engine inherits its own variable, so nothing may be passed to it as a flag.
    monkeypatch.setenv("CATENARY_ENGINE_GPU_MEMORY_UTILIZATION", "0.5")
    assert load()[0].gpu_memory_utilization is None
    monkeypatch.setenv("CATENARY_UP_GPU_MEMORY_UTILIZATION", "0.6")
    assert load()[0].gpu_memory_utilization == 0.6


def test_engine_options_count_for_the_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BUCKETING_STRATEGY", "lin")
    assert load()[1] == ()
    monkeypatch.setenv("CATENARY_ENGINE_BUCKETING_STRATEGY", "padding")
    assert load()[1] == ("VLLM_BUCKETING_STRATEGY: the option bucketing_strategy wins",)


def test_engines_share_the_visible_modules(tmp_path: Path) -> None:
    two = UpConfig(device="hpu", engines=2)
    assert modules_of(two, {}) == modules_of(two, {"HABANA_VISIBLE_MODULES": "all"}) == ()
    assert modules_of(UpConfig(device="hpu"), {"HABANA_VISIBLE_MODULES": "4"}) == ()
    assert modules_of(UpConfig(engines=2), {"HLS_MODULE_ID": "4"}) == ()
    modules = modules_of(two, {"HABANA_VISIBLE_MODULES": "4, 6"})
    places = Places((ReadyModel(Path("/models/m"), "m"),), (8000,), modules=modules)
    started = {spec.name: spec for spec in plan(two, RuntimeDirectory(tmp_path), places)}
    assert [started[f"engine-{i}"].environment["HLS_MODULE_ID"] for i in (0, 1)] == ["4", "6"]
    with pytest.raises(StartRefused, match="HLS_MODULE_ID=4 is one card for 2 engines"):
        modules_of(two, {"HLS_MODULE_ID": "4"})
    with pytest.raises(StartRefused, match="HABANA_VISIBLE_MODULES=4 has fewer cards than the 2 engines"):
        modules_of(two, {"HABANA_VISIBLE_MODULES": "4"})
