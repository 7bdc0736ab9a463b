"""The options of `catenary up`, and those that it leaves to one service."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from catenary.config import SERVICE_PREFIXES, VARIABLES, ServiceConfig, flag_name, option_of, settings
from catenary.cpus import parse_binding
from catenary.devices import DEVICES, DeviceChoice, choose_device
from catenary.parsers import ReasoningParser, ToolParser
from services.engine.options import EngineOptions


def service_classes() -> tuple[type[ServiceConfig], ...]:
    """Return the option classes of all services.

    They bring gRPC and an HTTP server, which take seconds to load.
    """
    from gateway import GatewayConfig
    from services.engine.config import EngineConfig
    from services.router.config import RouterConfig
    from services.tokenizer.config import TokenizerConfig

    return GatewayConfig, RouterConfig, TokenizerConfig, EngineConfig


def has_service_variables(names: Iterable[str]) -> bool:
    """Return whether one of the variables is an option of a service, or looks like one."""
    return any(name.startswith(SERVICE_PREFIXES) for name in names)


def service_flags() -> frozenset[str]:
    """Return the flags of all services, without loading their option classes."""
    return frozenset(flag_name(name) for prefix in SERVICE_PREFIXES for name in VARIABLES[prefix])


def variables_of(flag: str) -> tuple[str, ...]:
    """Return the variables that set the option of this flag, one for each service that has it; of --no-X,
    false."""
    found = []
    for prefix in SERVICE_PREFIXES:
        for name in VARIABLES[prefix]:
            if flag == flag_name(name):
                found.append(f"{prefix}{name.upper()}")
            elif flag == "--no" + flag_name(name)[1:]:
                found.append(f"{prefix}{name.upper()}=false")
    return tuple(found)


class UpConfig(ServiceConfig):
    """Serve models on this machine: start gateways, routers, tokenizers and engines, and supervise them.

    An option of one service that is not here is set through that service's environment variable, which its
    processes inherit: CATENARY_ENGINE_MAX_NUM_SEQS=8 catenary up.
    """

    model_config = settings(prefix="CATENARY_UP_")

    elsewhere: ClassVar[str] = (
        "options of a single service are environment variables: CATENARY_ENGINE_MAX_NUM_SEQS=8 is "
        "the engine's --max-num-seqs (docs/configuration.md); catenary vllm-serve takes the "
        "options of vllm serve"
    )

    positional: ClassVar[str] = "model"

    headings: ClassVar[Mapping[str, str]] = {
        "model": "Model",
        "host": "Addresses",
        "engines": "Processes and CPUs",
        "api_key": "Access",
        "cache_dir": "Files",
        "verbose": "Running",
    }

    @classmethod
    def elsewhere_for(cls, flag: str) -> str:
        """Return the variables of an option that services have, and not this command."""
        variables = " or ".join(variables_of(flag))
        return (
            f"options of one service are variables: {variables} (docs/configuration.md)" if variables else ""
        )

    @classmethod
    def elsewhere_flags(cls) -> Iterable[str]:
        """Return the options of services."""
        return service_flags()

    model: tuple[str, ...] = Field(
        default=("smollm2",),
        min_length=1,
        max_length=16,
        description="Model to serve: a Hugging Face directory, a GGUF file, a hub id, or built-in smollm2 or "
        "minilm. Several models are served at once. NAME=SOURCE also gives the name that requests use.",
    )
    task: tuple[str, ...] = Field(
        default=(),
        max_length=16,
        description="Task of the model: auto, generate, embed, score or classify; with several models "
        "NAME=TASK. Default: read from the model's files.",
    )
    served_model_name: str | None = Field(
        default=None, min_length=1, max_length=256, description="Name that requests use, for a single model."
    )
    model_alias: tuple[str, ...] = Field(
        default=(),
        max_length=256,
        description="Additional names that requests may use: ALIAS with a single model, ALIAS=NAME with "
        "several.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="Longest sequence in tokens, prompt and completion together. With several models it "
        "applies to those that generate, as --chat-template does.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = Field(
        default=None, description="Data type of the computation."
    )
    quantization: tuple[str, ...] = Field(
        default=(),
        max_length=17,
        description="Weight quantization on a CPU: none, int8 or int4. With several models NAME=VALUE is "
        "for one of them, and a value without a name for the others. Default: CATENARY_ENGINE_QUANTIZATION.",
    )
    gpu_memory_utilization: float | None = Field(
        default=None, gt=0, le=1, description="Fraction of the device's memory that an engine may use."
    )
    chat_template: Path | None = Field(default=None, description="File with a chat template for the model.")
    tool_parser: ToolParser | None = Field(
        default=None,
        description="Parser of tool calls; none turns it off. Default: derived from the chat template.",
    )
    reasoning_parser: ReasoningParser | None = Field(
        default=None,
        description="Parser of reasoning; none turns it off. Default: derived from the chat template.",
    )
    device: DeviceChoice = Field(
        default="auto",
        description="Device of the engines. auto: hpu or cuda if the host has one, else cpu. sim: an HPU "
        "simulated on the CPU.",
    )

    host: str = Field(default="127.0.0.1", description="Address that the gateways listen on.")
    port: int = Field(
        default=8000,
        ge=0,
        le=65535,
        description="Port of the first gateway; further gateways use the ports after it. 0: any free ports.",
    )
    router_port: int = Field(
        default=7070,
        ge=0,
        le=65535,
        description="Loopback port of the first router, for gRPC clients; further routers use the ports "
        "after it. 0: no port.",
    )
    tokenizer_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Loopback port of the first model's tokenizer, for gRPC clients; further models use the "
        "ports after it. 0: no port. Default: the port after the last router's, 7071 with one router.",
    )
    engines: int = Field(default=1, ge=1, le=64, description="Engines for each model.")
    engine_roles: tuple[Literal["prefill", "decode", "both"], ...] = Field(
        default=(),
        max_length=64,
        description="Role of each of the --engines of a model that generates: prefill (prompts only), decode "
        "(tokens after the prompt) or both. Default: both.",
    )
    routers: int = Field(default=1, ge=1, le=16, description="Routers.")
    cpu_bind: str = Field(
        default="auto",
        max_length=8192,
        description="CPUs on which engines compute, as 0-7|8-15: one list for each engine; the other "
        "services get the remaining CPUs. none: no binding. auto: with 8 cores or more, each "
        "engine is bound to cores of one NUMA node, one thread a core; with fewer, none.",
    )
    cpu_reserve: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="Cores that --cpu-bind auto reserves for the other services, for each engine. Default: "
        "one core from 8 cores on and one more for each further 16, for all engines together.",
    )
    gateways: int = Field(default=1, ge=1, le=64, description="Gateways.")
    tokenizers: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Tokenizer services for each model. Default: two with 8 cores or more, so that one takes "
        "over if the other fails; else one, and requests wait while it restarts.",
    )

    api_key: tuple[str, ...] = Field(
        default=(),
        description="API keys; clients must send one of them. Every user of this machine can read flags, so "
        "prefer --api-key-file.",
    )
    api_key_file: Path | None = Field(
        default=None,
        description="File of API keys, one a line, each optionally followed by limits; # starts a comment.",
    )
    cors_allow_origins: tuple[str, ...] = Field(
        default=(), description="Origins from which browsers may call (CORS)."
    )
    ssl_certfile: Path | None = Field(default=None, description="Certificate for HTTPS.")
    ssl_keyfile: Path | None = Field(default=None, description="Private key for HTTPS.")

    cache_dir: Path | None = Field(
        default=None,
        description="Directory of prepared models and logs. Default: CATENARY_CACHE, else ~/.cache/catenary.",
    )
    convert_timeout_s: float = option_of(EngineOptions, "convert_timeout_s")
    state_dir: Path | None = Field(
        default=None,
        description="Directory of stored responses, files and batches, shared by all gateways. Default: one "
        "directory for each gateway's port.",
    )
    log_dir: Path | None = Field(
        default=None, description="Directory of the services' logs. Default: in the cache directory."
    )
    verbose: bool = Field(default=False, description="Show the services' logs on the terminal as well.")
    drain_s: float = Field(
        default=30.0, ge=0, le=3600, description="Seconds that running requests get to finish at shutdown."
    )

    @field_validator("device")
    @classmethod
    def _the_device_is_one(cls, device: str) -> str:
        if device != "auto":
            return device
        # The variable of the engines themselves takes precedence.
        given = os.environ.get("CATENARY_ENGINE_DEVICE", "auto")
        return given if given in DEVICES else choose_device()

    @field_validator("cpu_bind")
    @classmethod
    def _known_binding(cls, text: str) -> str:
        parse_binding(text)
        return text

    @property
    def first_tokenizer_port(self) -> int:
        """The loopback port of the first model's tokenizer; 0 for none."""
        if self.tokenizer_port is not None:
            return self.tokenizer_port
        return (self.router_port or 7070) + self.routers
