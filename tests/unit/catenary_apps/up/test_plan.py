from __future__ import annotations

import json
import sys
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from catenary.cpus import EngineCpus, Placement, Topology
from catenary.devices import why_not_opened
from catenary.runtime import StartRefused
from catenary_apps.cli.runtime_directory import CLIENT_SECRET_ENV, ENGINE_SECRET_ENV, RuntimeDirectory
from catenary_apps.up.config import UpConfig
from catenary_apps.up.deployment import example_request
from catenary_apps.up.models import (
    ReadyModel,
    WantedModel,
    aliases_of,
    quantizations_of,
    tasks_of,
    wanted_models,
)
from catenary_apps.up.plan import ChildSpec, Places, Stage, child_environment, plan, without_secrets
from catenary_apps.up.resources import tokenizers_of
from catenary_apps.up.run import check_engines, check_places, served_name


@pytest.fixture
def runtime(tmp_path: Path) -> RuntimeDirectory:
    return RuntimeDirectory(tmp_path)


def make_plan(runtime: RuntimeDirectory, **options: object) -> dict[str, ChildSpec]:
    config = UpConfig(**options)  # type: ignore[arg-type]
    ports = tuple(range(8000, 8000 + config.gateways))
    places = Places((ReadyModel(Path("/models/m"), "m"),), ports, tokenizers=config.tokenizers or 1)
    return {spec.name: spec for spec in plan(config, runtime, places)}


def option(spec: ChildSpec, name: str) -> str | None:
    flag = f"--{name}"
    return spec.command[spec.command.index(flag) + 1] if flag in spec.command else None


def test_default_is_one_of_each(runtime: RuntimeDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runtime.path)
    specs = make_plan(runtime)
    assert list(specs) == ["router", "tokenizer-0", "engine-0", "gateway-0"]
    assert all(spec.command[:3] == (sys.executable, "-P", "-m") for spec in specs.values())
    assert option(specs["router"], "listen") == f"{runtime.socket('router')},127.0.0.1:7070"
    assert option(specs["tokenizer-0"], "listen") == f"{runtime.socket('tokenizer-0')},127.0.0.1:7071"
    assert option(specs["engine-0"], "router") == runtime.socket("router")
    assert option(specs["engine-0"], "model") == "/models/m"
    assert option(specs["gateway-0"], "port") == "8000"
    assert specs["engine-0"].status_target == runtime.socket("engine-0")


def checked(environment: dict[str, str] | None = None, **options: Any) -> str:
    """What `catenary up` says of its engines before it prepares a model."""
    config = UpConfig(**options)
    try:
        check_engines(config, tuple(WantedModel(model) for model in config.model), environment or {})
    except StartRefused as refused:
        return str(refused)
    return ""


def write_config(directory: Path, **values: object) -> tuple[str]:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(values))
    return (str(directory),)


def test_a_length_beyond_the_context_is_refused_before_a_model_is_prepared(tmp_path: Path) -> None:
    llama = write_config(tmp_path / "llama", model_type="llama", max_position_embeddings=512)
    inner = write_config(tmp_path / "vl", model_type="mllama", text_config={"max_position_embeddings": 600})
    bert = write_config(tmp_path / "bert", model_type="bert", max_position_embeddings=512)
    open_ended = write_config(tmp_path / "open", model_type="llama")
    refused = "max-model-len {} exceeds the model's context of {} tokens"
    assert checked(model=llama, max_model_len=513) == f"{llama[0]}: {refused.format(513, 512)}"
    assert checked(model=inner, max_model_len=601) == f"{inner[0]}: {refused.format(601, 600)}"
    assert checked(model=llama, max_model_len=512) == checked(model=llama) == ""
    for left_to_the_engine in (bert, open_ended, ("org/model",), (str(tmp_path / "none"),), (*llama, *bert)):
        assert checked(model=left_to_the_engine, max_model_len=513) == ""
    assert checked(model=llama, max_model_len=513, task=("embed",)) == ""
    for variable in ("CATENARY_ENGINE_ALLOW_LONG_MAX_MODEL_LEN", "CATENARY_ENGINE_SCRIPT"):
        assert checked({variable: "1"}, model=llama, max_model_len=513) == ""


def test_an_hpu_without_its_package_is_refused_before_a_model_is_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("catenary_apps.up.run.why_not_opened", partial(why_not_opened, package=absent))
    assert checked(device="hpu").startswith("--device hpu: the package habana-torch-plugin is not installed")
    assert checked({"CATENARY_ENGINE_SCRIPT": "default"}, device="hpu") == ""
    assert checked(device="sim") == checked(device="cpu") == ""


@pytest.mark.parametrize(
    ("wanted", "cores", "limit", "expected"),
    [(None, 7, 64, 1), (None, 8, 64, 2), (None, 64, 4, 1), (None, 64, 64, 2), (1, 64, 64, 1), (3, 2, 2, 3)],
)
def test_one_tokenizer_takes_over_from_another_where_there_is_room_for_two(
    wanted: int | None, cores: int, limit: int, expected: int
) -> None:
    topology = Topology((tuple((core,) for core in range(cores)),), limit)
    assert tokenizers_of(UpConfig(tokenizers=wanted), topology) == expected


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


def test_several_models(runtime: RuntimeDirectory) -> None:
    config = UpConfig(
        model=("chat=a", "embed=b"), engines=2, max_model_len=512, chat_template=Path("/t"), dtype="float32"
    )
    models = (ReadyModel(Path("/a"), "chat"), ReadyModel(Path("/b"), "embed", "embed", serves="embed"))
    specs = {
        spec.name: spec
        for spec in plan(config, runtime, Places(models, (8000,), cpus=Placement((EngineCpus(2),) * 4)))
    }
    names = [option(specs[f"engine-{index}"], "served-model-name") for index in range(4)]
    assert names == ["chat", "chat", "embed", "embed"]
    assert [option(specs[f"engine-{index}"], "max-model-len") for index in (0, 2)] == ["512", None]
    assert [option(specs[f"engine-{index}"], "task") for index in (0, 2)] == [None, "embed"]
    assert option(specs["engine-3"], "dtype") == "float32"
    assert specs["engine-0"].default_environment["CATENARY_ENGINE_DEVICE_THREADS"] == "2"
    assert [option(specs[f"tokenizer-{index}"], "model-dir") for index in (0, 1)] == ["/a", "/b"]
    assert [option(specs[f"tokenizer-{index}"], "chat-template") for index in (0, 1)] == ["/t", None]
    assert option(specs["tokenizer-1"], "listen") == f"{runtime.socket('tokenizer-1')},127.0.0.1:7072"
    both = f"{runtime.socket('tokenizer-0')},{runtime.socket('tokenizer-1')}"
    assert option(specs["gateway-0"], "tokenizer") == both


def test_how_models_are_named(tmp_path: Path) -> None:
    odd = tmp_path / "a=b"
    odd.mkdir()
    wanted = wanted_models(UpConfig(model=("chat=smollm2", "minilm", str(odd), "./x=y")))
    assert [(model.name, model.source) for model in wanted] == [
        ("chat", "smollm2"),
        (None, "minilm"),
        (None, str(odd)),
        (None, "./x=y"),
    ]
    named = ("org/think", "a b", "llama3:8b", "m@v2", "ä", "x", "Qwen/Qwen3-8B:latest")
    for name in named:
        (wanted_model,) = wanted_models(UpConfig(model=(f"{name}=smollm2",)))
        assert (wanted_model.name, wanted_model.source) == (name, "smollm2")
    (long,) = wanted_models(UpConfig(model=("a=" + "x" * 300,)))
    assert (long.name, long.source) == ("a", "x" * 300)
    (path,) = wanted_models(UpConfig(model=("org/think=/models/a=b",)))
    assert (path.name, path.source) == ("org/think", "/models/a=b")
    for path_text in ("/models/x=y", "../x=y", "~/x=y", " x=y", "x =y", "=y"):
        assert wanted_models(UpConfig(model=(path_text,)))[0].name is None
    assert wanted_models(UpConfig(model=("a",), served_model_name="b"))[0].name == "b"
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"model": ("a", "b"), "served_model_name": "c"}, "--model NAME=SOURCE"),
        ({"model": ("a=",)}, "source is missing"),
    )
    for options, text in cases:
        with pytest.raises(StartRefused, match=text):
            wanted_models(UpConfig(**options))


def test_further_names_of_models() -> None:
    def aliases(*given: str, names: tuple[str, ...] = ("a",)) -> tuple[str, ...]:
        return aliases_of(UpConfig(model_alias=given), names)

    assert aliases() == ()
    assert aliases("org/b:8b", "c d", "e=a") == ("org/b:8b=a", "c d=a", "e=a")
    assert aliases("x=b", "y=a", names=("a", "b")) == ("x=b", "y=a")
    for given, text in (
        (("x",), "write ALIAS=NAME"),
        (("x=c",), "no model has the name 'c'"),
        (("a=b",), "'a' is there twice"),
        (("x=a", "x=b"), "'x' is there twice"),
        (("=a",), "is no name"),
        (("./x=a",), "is no name"),
    ):
        with pytest.raises(StartRefused, match=text):
            aliases(*given, names=("a", "b"))


def test_a_gateway_knows_the_further_names(runtime: RuntimeDirectory) -> None:
    specs = make_plan(runtime, model_alias=("other",))
    assert option(specs["gateway-0"], "model-alias") == "other=m"
    assert specs["gateway-0"].default_environment == {"CATENARY_GATEWAY_DRAIN_NOTICE_S": "0"}


def test_several_routers_know_all_engines_and_gateways(runtime: RuntimeDirectory) -> None:
    specs = make_plan(runtime, routers=2)
    assert list(specs)[:3] == ["router-0", "router-1", "tokenizer-0"]
    assert option(specs["router-1"], "listen") == f"{runtime.socket('router-1')},127.0.0.1:7071"
    assert option(specs["tokenizer-0"], "listen") == f"{runtime.socket('tokenizer-0')},127.0.0.1:7072"
    both = f"{runtime.socket('router-0')},{runtime.socket('router-1')}"
    assert option(specs["engine-0"], "router") == option(specs["gateway-0"], "router") == both
    holders = {name for name, spec in specs.items() if option(spec, "engine-secret-file")}
    assert holders == {"router-0", "router-1", "engine-0"}


def test_roles_are_for_models_that_generate(runtime: RuntimeDirectory) -> None:
    config = UpConfig(engines=2, engine_roles=("prefill", "decode"))
    models = (ReadyModel(Path("/a"), "a"), ReadyModel(Path("/b"), "b", serves="embed"))
    specs = {spec.name: spec for spec in plan(config, runtime, Places(models, (8000,)))}
    roles = [option(specs[f"engine-{index}"], "role") for index in range(4)]
    assert roles == ["prefill", "decode", None, None]
    assert option(make_plan(runtime)["engine-0"], "role") is None


def test_roles_are_one_for_each_engine() -> None:
    with pytest.raises(StartRefused, match="--engine-roles names 2 engines, and --engines says 1"):
        check_places(UpConfig(engine_roles=("prefill", "decode"), port=0))
    with pytest.raises(ValidationError):
        UpConfig(engine_roles=("sing",))


def test_how_tasks_are_given() -> None:
    def tasks(*given: str, names: tuple[str, ...] = ("a", "b")) -> tuple[str, ...]:
        return tasks_of(UpConfig(task=given), names)

    assert tasks() == ("auto", "auto")
    assert tasks("b=embed") == ("auto", "embed")
    assert tasks("score", names=("a",)) == ("score",)
    for given, text in (("embed", "NAME=TASK"), ("c=embed", "no model"), ("a=sing", "expected auto")):
        with pytest.raises(StartRefused, match=text):
            tasks(given)
    with pytest.raises(StartRefused, match="one name"):
        tasks(names=("a", "a"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"quantization": ("fp8",)}, "--quantization 'fp8': expected none, int8 or int4"),
        ({"quantization": ("chat=fp8",)}, "--quantization 'chat=fp8': expected none"),
        ({"task": ("sing",)}, "--task 'sing': expected auto, generate, embed"),
    ],
)
def test_words_that_are_none_are_refused_before_a_model_is_prepared(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(StartRefused, match=text):
        wanted_models(UpConfig(**options))


def test_each_model_has_its_quantization() -> None:
    def quantizations(*given: str, names: tuple[str, ...] = ("a", "b")) -> tuple[str | None, ...]:
        return quantizations_of(UpConfig(quantization=given), names)

    assert quantizations() == (None, None)
    assert quantizations("int8") == ("int8", "int8")
    assert quantizations("a=int8") == ("int8", None)
    assert quantizations("b=none", "int4") == ("int4", "none")
    assert quantizations("int8", names=("a",)) == ("int8",)
    for given, text in (
        (("fp8",), "expected none, int8 or int4"),
        (("a=",), "expected none, int8 or int4"),
        (("c=int8",), "no model has the name 'c'"),
        (("=int8",), "no model has the name ''"),
        (("a=int8", "a=none"), "a is there twice"),
        (("int8", "none"), "without a name is there twice"),
    ):
        with pytest.raises(StartRefused, match=text):
            quantizations(*given)


def test_an_engine_is_told_what_its_own_model_is_packed_as(runtime: RuntimeDirectory) -> None:
    models = (
        ReadyModel(Path("/a"), "chat", quantization="int8"),
        ReadyModel(Path("/b"), "embed", serves="embed", quantization="none"),
        ReadyModel(Path("/c"), "other", serves="embed"),
    )
    cpus = Placement((EngineCpus(1),) * 3)
    config = UpConfig(gpu_memory_utilization=0.5)
    specs = {spec.name: spec for spec in plan(config, runtime, Places(models, (8000,), cpus=cpus))}
    engines = [specs[f"engine-{index}"] for index in range(3)]
    assert [option(engine, "quantization") for engine in engines] == ["int8", "none", None]
    # Without KV there is nothing that a share of the memory bounds.
    assert [option(engine, "gpu-memory-utilization") for engine in engines] == ["0.5", None, None]
    shared = ["CATENARY_ENGINE_GPU_MEMORY_UTILIZATION" in engine.default_environment for engine in engines]
    assert shared == [True, False, False]


def test_engines_keep_everything_in_the_chosen_cache(runtime: RuntimeDirectory, tmp_path: Path) -> None:
    assert option(make_plan(runtime, cache_dir=tmp_path)["engine-0"], "cache-dir") == str(tmp_path)
    assert option(make_plan(runtime)["engine-0"], "cache-dir") is None


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
        "CATENARY_GATEWAY_OPERATOR_KEY": "s-operator",
        "CATENARY_GATEWAY_LIMITS_STORE": "s-store",
    }
    inherited = secrets | {"CATENARY_ENGINE_MAX_NUM_SEQS": "8"}
    for name, spec in make_plan(runtime).items():
        environment = child_environment(spec, inherited)
        assert environment["CATENARY_ENGINE_MAX_NUM_SEQS"] == "8"
        held = {value for value in environment.values() if value.startswith("s-")}
        owned = {"s-gateway", "s-operator", "s-store"} if name == "gateway-0" else set()
        assert held == owned, name
    chosen = make_plan(runtime, api_key=("k-one",))["gateway-0"]
    assert child_environment(chosen, inherited)["CATENARY_GATEWAY_API_KEY"] == "k-one"
    assert without_secrets(inherited) == {"CATENARY_ENGINE_MAX_NUM_SEQS": "8"}


def test_file_of_keys_goes_to_the_gateways(runtime: RuntimeDirectory) -> None:
    specs = make_plan(runtime, api_key_file="/keys")
    assert [name for name, spec in specs.items() if option(spec, "api-key-file") == "/keys"] == ["gateway-0"]


def test_engines_share_a_cpu(runtime: RuntimeDirectory) -> None:
    config = UpConfig(engines=2)
    placement = Placement((EngineCpus(2),) * 2)
    specs = plan(config, runtime, Places((ReadyModel(Path("/models/m"), "m"),), (8000,), cpus=placement))
    engine = next(spec for spec in specs if spec.name == "engine-0")
    assert child_environment(engine, {})["CATENARY_ENGINE_DEVICE_THREADS"] == "2"
    assert child_environment(engine, {})["CATENARY_ENGINE_GPU_MEMORY_UTILIZATION"] == "0.400"
    chosen = {"CATENARY_ENGINE_DEVICE_THREADS": "3"}
    assert child_environment(engine, chosen)["CATENARY_ENGINE_DEVICE_THREADS"] == "3"
    assert not make_plan(runtime, engines=2, device="hpu")["engine-0"].default_environment


def test_bound_engine_leaves_the_other_cpus_to_the_services(runtime: RuntimeDirectory) -> None:
    placement = Placement((EngineCpus(3, (0, 1, 2)),), (3, 7))
    places = Places((ReadyModel(Path("/models/m"), "m"),), (8000,), cpus=placement)
    specs = {spec.name: spec for spec in plan(UpConfig(), runtime, places)}
    assert specs["engine-0"].default_environment == {
        "OMP_WAIT_POLICY": "PASSIVE",
        "CATENARY_ENGINE_CPU_BIND": "0-2",
    }
    # The servicer of an engine is a service like the others.
    assert {spec.cpus for spec in specs.values()} == {(3, 7)}
    assert {spec.cpus for spec in make_plan(runtime).values()} == {()}


def test_served_name(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "tiny.Q8_0.gguf").touch()
    assert served_name("smollm2", None) == "SmolLM2-135M-Instruct"
    assert served_name("smollm2", "chat") == "chat"
    assert served_name(str(tmp_path / "my-model"), None) == "my-model"
    assert served_name(str(tmp_path / "tiny.Q8_0.gguf"), None) == "tiny.Q8_0"
    assert served_name("org/name", None) == "org/name"


@pytest.mark.parametrize(
    ("options", "port"),
    [
        ({}, 7071),
        ({"router_port": 0}, 7071),
        ({"routers": 2}, 7072),
        ({"router_port": 9070}, 9071),
        ({"router_port": 9070, "tokenizer_port": 7071}, 7071),
        ({"tokenizer_port": 0}, 0),
    ],
)
def test_the_tokenizers_port_is_none_of_the_routers(options: dict[str, int], port: int) -> None:
    assert UpConfig(**options).first_tokenizer_port == port  # type: ignore[arg-type]


def test_the_example_of_a_deployment_asks_what_its_model_is_for() -> None:
    def path(*tasks: str) -> str:
        return example_request([ReadyModel(Path("/m"), task, serves=task) for task in tasks])[0]

    assert path("classify") == "/classify"
    assert path("embed") == path("score") == "/v1/rerank"
    assert path("classify", "generate") == "/v1/chat/completions"
