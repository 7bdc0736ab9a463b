"""Processes of a `catenary up`: pure, from the options and the places to the processes' command lines."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from catenary.config import flag_name
from catenary.cpus import EngineCpus, Placement, format_cpus
from catenary.directories import expanded
from catenary.runtime import module_command
from catenary_apps.cli.runtime_directory import CLIENT_SECRET_ENV, ENGINE_SECRET_ENV, RuntimeDirectory
from catenary_apps.up.config import UpConfig
from catenary_apps.up.models import ReadyModel, aliases_of
from catenary_apps.up.resources import BIND_ENV, THREADS_ENV

# Where a gateway finds its API keys, and where `catenary up` itself may have found them.
GATEWAY_KEY_ENV = "CATENARY_GATEWAY_API_KEY"
UP_KEY_ENV = "CATENARY_UP_API_KEY"
GATEWAY_KEYS = (GATEWAY_KEY_ENV, "CATENARY_GATEWAY_OPERATOR_KEY")
# Beside keys the gateways alone get a URL that may hold a password.
_GATEWAY_SECRETS = (*GATEWAY_KEYS, "CATENARY_GATEWAY_LIMITS_STORE")
VLLM_KEY_ENV = "VLLM_API_KEY"
# The card that a process takes, and those that it may choose from.
MODULE_ENV = "HLS_MODULE_ID"
MODULES_ENV = "HABANA_VISIBLE_MODULES"
# Engines replay this script and open no device.
SCRIPT_ENV = "CATENARY_ENGINE_SCRIPT"
# What all engines of a CPU machine take of its memory together.
CPU_MEMORY_SHARE = 0.8


class Stage(IntEnum):
    """When a process is told to stop: stages go one after another, the processes of a stage together.

    Gateways first, so that no request comes in; then routers and engines, which finish running requests;
    the tokenizers last.
    """

    GATEWAY = 0
    FLEET = 1
    TOKENIZER = 2


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process to keep running."""

    name: str
    command: tuple[str, ...]
    stage: Stage
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    # Variables that a person's own setting wins over.
    default_environment: Mapping[str, str] = field(default_factory=dict)
    # Of an engine: the gRPC address for GetStatus, and the model's name. Else empty.
    status_target: str = ""
    model_name: str = ""
    # CPUs to keep to, if any.
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Places:
    """Findings before the start: the models, the ports, the CPUs of engines that compute on them.

    `tokenizers`: services of each model. `modules` are the ids of the Gaudi cards that the engines may take,
    empty if they are not limited.
    """

    models: tuple[ReadyModel, ...]
    gateway_ports: tuple[int, ...]
    cpus: Placement | None = None
    tokenizers: int = 1
    modules: tuple[str, ...] = ()

    def is_meant(self, model: ReadyModel) -> bool:
        """Return whether options of generating models are for this one: for every one if none generates."""
        return model.generates or not any(other.generates for other in self.models)


def _command(module: str, options: Mapping[str, object]) -> tuple[str, ...]:
    """Return a service's command line; None, False and empty options are left to its defaults."""
    flags: list[str] = []
    for name, value in options.items():
        if isinstance(value, tuple):
            value = ",".join(map(str, value))
        if value not in (None, False, ""):
            flags += [f"--{name}", str(value)]
    return (*module_command(module), *flags)


def engine_module(environment: Mapping[str, str]) -> str:
    """Return the module that engines run: with SCRIPT_ENV set, the scripted one, which is only for tests."""
    return "catenary_testing.engine" if SCRIPT_ENV in environment else "services.engine"


def plan(config: UpConfig, runtime: RuntimeDirectory, places: Places) -> tuple[ChildSpec, ...]:
    """Return the processes in the order in which they start."""
    logging = {"log-level": config.log_level, "log-format": config.log_format}
    rpc = logging | {"client-secret-file": runtime.client_secret, "drain-s": config.drain_s}
    models = places.models
    # Of each model in turn.
    served = [model for model in models for _ in range(places.tokenizers)]
    tokenizers = tuple(f"tokenizer-{index}" for index in range(len(served)))
    routers = tuple(runtime.socket(name) for name in router_names(config))
    specs = (
        *(_router(config, runtime, rpc, index) for index in range(config.routers)),
        *(_tokenizer(config, runtime, places, rpc, index) for index in range(len(served))),
        *(_engine(config, runtime, places, rpc, index) for index in range(len(models) * config.engines)),
        *(
            ChildSpec(
                name=f"gateway-{index}",
                command=_command(
                    "gateway",
                    rpc
                    | {
                        "host": config.host,
                        "port": port,
                        "router": routers,
                        "tokenizer": tuple(runtime.socket(name) for name in tokenizers),
                        "model-alias": aliases_of(config, tuple(model.name for model in models)),
                        "api-key-file": config.api_key_file,
                        "cors-allow-origins": config.cors_allow_origins,
                        "ssl-certfile": config.ssl_certfile,
                        "ssl-keyfile": config.ssl_keyfile,
                        "state-dir": config.state_dir,
                    },
                ),
                stage=Stage.GATEWAY,
                # Not on the command line, where every user of the machine could read them.
                environment={GATEWAY_KEY_ENV: ",".join(config.api_key)} if config.api_key else {},
                # All of them stop together: no client could go elsewhere meanwhile.
                default_environment={"CATENARY_GATEWAY_DRAIN_NOTICE_S": "0"},
            )
            for index, port in enumerate(places.gateway_ports)
        ),
    )
    # An engine's core, which its servicer starts, goes to its own by CATENARY_ENGINE_CPU_BIND.
    cpus = places.cpus.services if places.cpus is not None else None
    return tuple(replace(spec, cpus=cpus or ()) for spec in specs)


def overruled(specs: Iterable[ChildSpec], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return one line for each variable of a service that has no effect, since the service is given another
    value.

    The line says which option of `catenary up` there is for it, and not the value.
    """
    lines: dict[str, None] = {}
    for spec in specs:
        kind = spec.name.partition("-")[0]
        for flag, value in zip(spec.command, spec.command[1:], strict=False):
            option = flag.removeprefix("--").replace("-", "_")
            variable = f"CATENARY_{kind.upper()}_{option.upper()}"
            if not flag.startswith("--") or environment.get(variable, "") in ("", value):
                continue
            own = "model" if option == "model_dir" else option
            instead = f"give {flag_name(own)}" if own in UpConfig.model_fields else "it is chosen here"
            lines[f"{variable} has no effect under catenary up: {instead}"] = None
    return tuple(lines)


def router_names(config: UpConfig) -> tuple[str, ...]:
    """Return the names of the routers, which are those of their sockets: `router` if there is one."""
    if config.routers == 1:
        return ("router",)
    return tuple(f"router-{index}" for index in range(config.routers))


def _router(config: UpConfig, runtime: RuntimeDirectory, rpc: Mapping[str, object], index: int) -> ChildSpec:
    name = router_names(config)[index]
    listen = [runtime.socket(name)]
    if config.router_port:
        listen.append(f"127.0.0.1:{config.router_port + index}")
    options = {**rpc, "listen": tuple(listen), "engine-secret-file": runtime.engine_secret}
    return ChildSpec(name=name, command=_command("services.router", options), stage=Stage.FLEET)


def _tokenizer(
    config: UpConfig, runtime: RuntimeDirectory, places: Places, rpc: Mapping[str, object], index: int
) -> ChildSpec:
    name, (number, place) = f"tokenizer-{index}", divmod(index, places.tokenizers)
    model = places.models[number]
    listen = [runtime.socket(name)]
    if config.first_tokenizer_port and not place:
        listen.append(f"127.0.0.1:{config.first_tokenizer_port + number}")
    options = {
        **rpc,
        "listen": tuple(listen),
        "model-dir": model.directory,
        "served-model-name": model.name,
    }
    if places.is_meant(model):
        options |= {
            "chat-template": config.chat_template,
            "tool-parser": config.tool_parser,
            "reasoning-parser": config.reasoning_parser,
        }
    return ChildSpec(name=name, command=_command("services.tokenizer", options), stage=Stage.TOKENIZER)


def _engine(
    config: UpConfig, runtime: RuntimeDirectory, places: Places, rpc: Mapping[str, object], index: int
) -> ChildSpec:
    name, (number, place) = f"engine-{index}", divmod(index, config.engines)
    model = places.models[number]
    divides = model.generates and config.engine_roles
    options = {
        **rpc,
        "listen": runtime.socket(name),
        "router": tuple(runtime.socket(router) for router in router_names(config)),
        "engine-secret-file": runtime.engine_secret,
        "engine-name": name,
        "model": model.directory,
        "cache-dir": config.cache_dir and expanded(config.cache_dir),
        "role": config.engine_roles[place] if divides else None,
        "task": None if model.task == "auto" else model.task,
        "served-model-name": model.name,
        "max-model-len": config.max_model_len if places.is_meant(model) else None,
        "dtype": config.dtype,
        "quantization": model.quantization,
        "device": config.device,
        "gpu-memory-utilization": config.gpu_memory_utilization if model.generates else None,
    }
    # Engines that generate take a share of the free memory each; one that embeds takes only its weights.
    sharing = config.engines * len(places.models) if model.generates else 1
    return ChildSpec(
        name=name,
        command=_command(engine_module(os.environ), options),
        stage=Stage.FLEET,
        environment={MODULE_ENV: places.modules[index]} if places.modules else {},
        default_environment=_cpu_environment(sharing, places.cpus.engines[index]) if places.cpus else {},
        status_target=runtime.socket(name),
        model_name=model.name,
    )


def _cpu_environment(sharing: int, mine: EngineCpus) -> dict[str, str]:
    """Return how an engine computes on a machine that it shares, if only with the other services."""
    # OpenMP's threads spin at barriers by default: beside one other busy process that costs a factor of ten.
    environment = {"OMP_WAIT_POLICY": "PASSIVE"}
    if mine.cpus is not None:
        environment[BIND_ENV] = format_cpus(mine.cpus)
    else:
        environment |= {BIND_ENV: "none", THREADS_ENV: str(mine.threads)}
    if sharing > 1:
        environment["CATENARY_ENGINE_GPU_MEMORY_UTILIZATION"] = f"{CPU_MEMORY_SHARE / sharing:.3f}"
    return environment


def without_secrets(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the secrets that a person may have given `catenary up` in it."""
    secrets = (CLIENT_SECRET_ENV, ENGINE_SECRET_ENV, *_GATEWAY_SECRETS, UP_KEY_ENV, VLLM_KEY_ENV)
    return {name: value for name, value in inherited.items() if name not in secrets}


def child_environment(spec: ChildSpec, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return a child's environment: the inherited one, without the secrets that are not its business."""
    kept = without_secrets(inherited)
    if spec.stage is Stage.GATEWAY:
        kept |= {name: inherited[name] for name in _GATEWAY_SECRETS if name in inherited}
    return {**spec.default_environment, **kept, "PYTHONUNBUFFERED": "1", **spec.environment}
