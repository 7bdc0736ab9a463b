from __future__ import annotations

import sys
from pathlib import Path

import pytest

from catenary.cli.up import UpConfig
from catenary.cli.up.model import served_name
from catenary.cli.up.plan import ChildSpec, Places, Stage, child_environment, plan, without_secrets
from catenary.cli.up.runtime import CLIENT_SECRET_ENV, ENGINE_SECRET_ENV, RuntimeDirectory


@pytest.fixture
def runtime(tmp_path: Path) -> RuntimeDirectory:
    return RuntimeDirectory(tmp_path)


def make_plan(runtime: RuntimeDirectory, **options: object) -> dict[str, ChildSpec]:
    config = UpConfig(**options)  # type: ignore[arg-type]
    ports = tuple(range(8000, 8000 + config.gateways))
    return {spec.name: spec for spec in plan(config, runtime, Places(Path("/models/m"), "m", ports))}


def option(spec: ChildSpec, name: str) -> str | None:
    flag = f"--{name}"
    return spec.command[spec.command.index(flag) + 1] if flag in spec.command else None


def test_default_is_one_of_each(runtime: RuntimeDirectory) -> None:
    specs = make_plan(runtime)
    assert list(specs) == ["router", "tokenizer-0", "engine-0", "gateway-0"]
    assert all(spec.command[:3] == (sys.executable, "-P", "-m") for spec in specs.values())
    assert option(specs["router"], "listen") == f"{runtime.socket('router')},127.0.0.1:7070"
    assert option(specs["tokenizer-0"], "listen") == f"{runtime.socket('tokenizer-0')},127.0.0.1:7071"
    assert option(specs["engine-0"], "router") == runtime.socket("router")
    assert option(specs["engine-0"], "model") == "/models/m"
    assert option(specs["gateway-0"], "port") == "8000"
    assert specs["engine-0"].status_target == runtime.socket("engine-0")


def test_options_reach_their_service_and_unset_ones_do_not(runtime: RuntimeDirectory) -> None:
    specs = make_plan(runtime, max_model_len=512, dtype="float32", gpu_memory_utilization=0.5)
    assert option(specs["engine-0"], "max-model-len") == "512"
    assert option(specs["engine-0"], "dtype") == "float32"
    assert option(specs["engine-0"], "gpu-memory-utilization") == "0.5"
    assert option(make_plan(runtime)["engine-0"], "dtype") is None


def test_scaled_out(runtime: RuntimeDirectory) -> None:
    specs = make_plan(runtime, engines=2, gateways=3, tokenizers=2)
    assert [option(specs[f"gateway-{i}"], "port") for i in range(3)] == ["8000", "8001", "8002"]
    both = f"{runtime.socket('tokenizer-0')},{runtime.socket('tokenizer-1')}"
    assert option(specs["gateway-2"], "tokenizer") == both
    # One process can have the published port.
    assert option(specs["tokenizer-1"], "listen") == runtime.socket("tokenizer-1")
    assert option(specs["engine-1"], "engine-name") == "engine-1"


def test_ports_for_grpc_clients_can_be_off(runtime: RuntimeDirectory) -> None:
    specs = make_plan(runtime, router_port=0, tokenizer_port=0)
    assert option(specs["router"], "listen") == runtime.socket("router")
    assert option(specs["tokenizer-0"], "listen") == runtime.socket("tokenizer-0")


def test_no_command_line_holds_a_secret(runtime: RuntimeDirectory) -> None:
    specs = make_plan(runtime, api_key=("k-one", "k-two"))
    assert not any("k-one" in word for spec in specs.values() for word in spec.command)
    assert specs["gateway-0"].environment == {"CATENARY_GATEWAY_API_KEY": "k-one,k-two"}
    assert "k-one" not in repr(specs["gateway-0"])


def test_only_router_and_engines_hold_the_engine_secret(runtime: RuntimeDirectory) -> None:
    specs = make_plan(runtime)
    holders = {name for name, spec in specs.items() if option(spec, "engine-secret-file")}
    assert holders == {"router", "engine-0"}


def test_gateways_drain_before_the_fleet_and_tokenizers_last(runtime: RuntimeDirectory) -> None:
    stages = {name: spec.stage for name, spec in make_plan(runtime).items()}
    assert stages["gateway-0"] < stages["router"] == stages["engine-0"] < stages["tokenizer-0"]
    assert list(Stage) == sorted(Stage)


def test_children_inherit_no_secret_but_gateways_their_keys(runtime: RuntimeDirectory) -> None:
    secrets = {
        CLIENT_SECRET_ENV: "s-client",
        ENGINE_SECRET_ENV: "s-engine",
        "CATENARY_UP_API_KEY": "s-up",
        "CATENARY_GATEWAY_API_KEY": "s-gateway",
    }
    inherited = secrets | {"CATENARY_ENGINE_MAX_NUM_SEQS": "8"}
    for name, spec in make_plan(runtime).items():
        environment = child_environment(spec, inherited)
        assert environment["CATENARY_ENGINE_MAX_NUM_SEQS"] == "8"
        held = {value for value in environment.values() if value.startswith("s-")}
        assert held == ({"s-gateway"} if name == "gateway-0" else set()), name
    chosen = make_plan(runtime, api_key=("k-one",))["gateway-0"]
    assert child_environment(chosen, inherited)["CATENARY_GATEWAY_API_KEY"] == "k-one"
    assert without_secrets(inherited) == {"CATENARY_ENGINE_MAX_NUM_SEQS": "8"}


def test_file_of_keys_goes_to_the_gateways(runtime: RuntimeDirectory) -> None:
    specs = make_plan(runtime, api_key_file="/keys")
    assert [name for name, spec in specs.items() if option(spec, "api-key-file") == "/keys"] == ["gateway-0"]


def test_engines_share_a_cpu(runtime: RuntimeDirectory) -> None:
    config = UpConfig(engines=2)
    specs = plan(config, runtime, Places(Path("/models/m"), "m", (8000,), cores=4))
    engine = next(spec for spec in specs if spec.name == "engine-0")
    assert child_environment(engine, {})["CATENARY_ENGINE_DEVICE_THREADS"] == "2"
    assert child_environment(engine, {})["CATENARY_ENGINE_GPU_MEMORY_UTILIZATION"] == "0.400"
    chosen = {"CATENARY_ENGINE_DEVICE_THREADS": "3"}
    assert child_environment(engine, chosen)["CATENARY_ENGINE_DEVICE_THREADS"] == "3"
    assert make_plan(runtime)["engine-0"].default_environment == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert not make_plan(runtime, engines=2, device="hpu")["engine-0"].default_environment


def test_served_name(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "tiny.Q8_0.gguf").touch()
    assert served_name("smollm2", None) == "SmolLM2-135M-Instruct"
    assert served_name("smollm2", "chat") == "chat"
    assert served_name(str(tmp_path / "my-model"), None) == "my-model"
    assert served_name(str(tmp_path / "tiny.Q8_0.gguf"), None) == "tiny.Q8_0"
    assert served_name("org/name", None) == "org/name"
