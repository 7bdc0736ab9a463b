"""The options of `catenary up`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from catenary.config import ServiceConfig, settings
from catenary.cpus import parse_binding
from catenary.devices import choose_device
from catenary.parsers import ReasoningParser, ToolParser
from catenary_apps.up.elsewhere import service_flags, variables_of


class UpConfig(ServiceConfig):
    """Serve models on this machine: gateway, router, tokenizer and engines under one supervisor.

    An option of one service that is not here is set through that service's environment variable, which its
    processes inherit: CATENARY_ENGINE_MAX_NUM_SEQS=8 catenary up.
    """

    model_config = settings(prefix="CATENARY_UP_")

    elsewhere: ClassVar[str] = (
        "options of one service are variables, as CATENARY_ENGINE_MAX_NUM_SEQS=8 for the engine's "
        "--max-num-seqs (docs/configuration.md); catenary vllm-serve takes those of vllm serve"
    )

    positional: ClassVar[str] = "model"

    headings: ClassVar[Mapping[str, str]] = {
        "model": "What is served",
        "host": "Where it is served",
        "engines": "How many processes, on which CPUs",
        "api_key": "Access",
        "cache_dir": "Where things are kept",
        "verbose": "Running",
    }

    @classmethod
    def elsewhere_for(cls, flag: str) -> str:
        """The variables of an option that services have, and not this command."""
        variables = " or ".join(variables_of(flag))
        return (
            f"options of one service are variables: {variables} (docs/configuration.md)" if variables else ""
        )

    @classmethod
    def elsewhere_flags(cls) -> Iterable[str]:
        """The options of services."""
        return service_flags()

    model: tuple[str, ...] = Field(
        default=("smollm2",),
        min_length=1,
        max_length=16,
        description="Model: a Hugging Face directory, a GGUF file, a hub id, or a built-in one, smollm2 or "
        "minilm. Several are served at once; each may be written as NAME=SOURCE, the name that requests use.",
    )
    task: tuple[str, ...] = Field(
        default=(),
        max_length=16,
        description="What the model is served for: auto, generate, embed, score or classify; of several, "
        "NAME=TASK. Default: what the model's files say.",
    )
    served_model_name: str | None = Field(
        default=None, min_length=1, max_length=256, description="Name that requests use for a single model."
    )
    model_alias: tuple[str, ...] = Field(
        default=(),
        max_length=256,
        description="Further names that requests may use: ALIAS for a single model; of several, ALIAS=NAME.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="Longest sequence in tokens, prompt and completion together. Of several models it is for "
        "those that generate, like chat_template.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = Field(
        default=None, description="Type to compute in."
    )
    quantization: tuple[str, ...] = Field(
        default=(),
        max_length=17,
        description="CPU: what weights are packed as: none, int8 or int4. Of several models NAME=VALUE is "
        "for one of them, a value without a name for the others. Default: what CATENARY_ENGINE_QUANTIZATION "
        "says.",
    )
    gpu_memory_utilization: float | None = Field(
        default=None, gt=0, le=1, description="Share of the device's memory that an engine may use."
    )
    chat_template: Path | None = Field(default=None, description="File with a chat template for the model.")
    tool_parser: ToolParser | None = Field(
        default=None, description="Parser of tool calls; none: no. Default: told by the chat template."
    )
    reasoning_parser: ReasoningParser | None = Field(
        default=None, description="Parser of reasoning; none: no. Default: told by the chat template."
    )
    device: Literal["auto", "cpu", "cuda", "hpu", "sim"] = Field(
        default="auto",
        description="Device of the engines. auto: hpu, cuda or cpu, by what is there. sim: an HPU simulated "
        "on the CPU.",
    )

    host: str = Field(default="127.0.0.1", description="Address that the gateways listen on.")
    port: int = Field(
        default=8000,
        ge=0,
        le=65535,
        description="Port of the first gateway, others count on; 0: free ports.",
    )
    router_port: int = Field(
        default=7070,
        ge=0,
        le=65535,
        description="Loopback port of the router for gRPC clients, those of several count on; 0: none.",
    )
    tokenizer_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Loopback port of the tokenizer for gRPC clients, others' of several models count on; "
        "0: none. Absent: the one behind the routers', 7071 behind a single one.",
    )
    engines: int = Field(default=1, ge=1, le=64, description="Number of engines of each model.")
    engine_roles: tuple[Literal["prefill", "decode", "both"], ...] = Field(
        default=(),
        max_length=64,
        description="What each engine of a model that generates computes: prompts alone (prefill), what "
        "follows them (decode) or both, one for each of --engines. Default: both.",
    )
    routers: int = Field(default=1, ge=1, le=16, description="Number of routers.")
    cpu_bind: str = Field(
        default="auto",
        max_length=8192,
        description="CPUs that engines on a CPU compute on, as 0-7|8-15, one list for each engine, the "
        "services taking the rest. none: wherever there is room. auto: one thread a core and each engine in "
        "one NUMA node, once there are 8 cores; fewer are shared.",
    )
    cpu_reserve: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="Cores for each engine on a CPU that cpu_bind auto keeps for the services. Absent: from "
        "8 cores on one of them, and one of each further 16, for all engines together.",
    )
    gateways: int = Field(default=1, ge=1, le=64, description="Number of gateways.")
    tokenizers: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Number of tokenizer services of each model. Absent: two from 8 cores on, so that one "
        "takes over from the other; with fewer one, for which requests wait while it is started again.",
    )

    api_key: tuple[str, ...] = Field(
        default=(),
        description="API keys of which clients must send one. Every user of this machine can read a flag: "
        "--api-key-file is better.",
    )
    api_key_file: Path | None = Field(
        default=None,
        description="File of API keys, one a line, maybe with limits of its own; # starts a comment.",
    )
    cors_allow_origins: tuple[str, ...] = Field(
        default=(), description="Origins that browsers may call from."
    )
    ssl_certfile: Path | None = Field(default=None, description="Certificate for HTTPS.")
    ssl_keyfile: Path | None = Field(default=None, description="Private key for HTTPS.")

    cache_dir: Path | None = Field(
        default=None,
        description="Prepared models and logs (default: CATENARY_CACHE, else ~/.cache/catenary).",
    )
    convert_timeout_s: float = Field(
        default=7200.0, gt=0, le=86_400, description="Seconds that converting a GGUF file, once, may take."
    )
    state_dir: Path | None = Field(
        default=None,
        description="Directory of stored responses, files and batches, for all gateways together. Default: "
        "the gateways' own, one for each port.",
    )
    log_dir: Path | None = Field(
        default=None, description="Directory for the services' logs (default: in the cache)."
    )
    verbose: bool = Field(default=False, description="Show the services' logs on the terminal as well.")
    drain_s: float = Field(
        default=30.0, ge=0, le=3600, description="Seconds that running requests get to end at shutdown."
    )

    @field_validator("device")
    @classmethod
    def _the_device_is_one(cls, device: str) -> str:
        if device != "auto":
            return device
        # The variable of the engines themselves takes precedence.
        given = os.environ.get("CATENARY_ENGINE_DEVICE", "auto")
        return given if given in ("cpu", "cuda", "hpu", "sim") else choose_device()

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
