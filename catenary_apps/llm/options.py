"""What `LLM(...)` is given, as options of an engine: our names, and those of vLLM."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from catenary.config import ConfigError, ServiceConfig, reason
from catenary.nearest import near
from catenary.parameters import UnknownNameError
from catenary.rpc import RpcConfig
from catenary_apps.migration import ENGINE_PREFIX, SERVE_OPTIONS, UP_PREFIX, Launch, ServeOption
from services.engine.config import EngineConfig
from services.engine.option_groups import TransferOptions

# Options of the engine that concern its network: there is none here.
_NETWORK = frozenset(
    {*RpcConfig.model_fields, *TransferOptions.model_fields, "router", "engine_name"}
    - ServiceConfig.model_fields.keys()
)
# Options of vLLM's LLM that ask for nothing here: no statistics are logged.
_IDLE = frozenset({"disable_log_stats"})
# Options of the engine for which vLLM has further values.
_BOTH = frozenset({"dtype", "task", "max_model_len", "served_model_name"})
_FLAGS = {True: "true", False: "false"}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the engine by name, and of what stands around it."""

    engine: Mapping[str, Any]
    chat_template: Path | None = None


def read_options(model: str, given: Mapping[str, Any]) -> EngineOptions:
    """The options of an engine from those that an LLM of this model was given.

    A name that the engine has is the engine's. Another one may be vLLM's: it is what the same option of
    `vllm serve` is to `catenary vllm-serve`. None, and an empty object or list, ask for nothing.

    Raises ValueError, one line, for what cannot be done, and UnknownNameError (a TypeError and ValueError)
    for a name that neither has.
    """
    known = EngineConfig.model_fields.keys() - _NETWORK
    own, launch = dict[str, Any](), Launch()
    launch.ask(f"{UP_PREFIX}MODEL", model)
    for name, value in given.items():
        if value is None or (isinstance(value, dict | list | tuple) and not value):
            continue
        if (name in known and not (name in _BOTH and isinstance(value, str | int))) or not _ask(
            launch, name, value, known
        ):
            own[name] = value
    for line in launch.warnings:
        warnings.warn(_in_python(line), stacklevel=5)
    asked = launch.variables({})
    asked.pop(f"{UP_PREFIX}MODEL")
    engine, around = dict[str, Any](), dict[str, str]()
    for variable, text in asked.items():
        option = variable.removeprefix(UP_PREFIX).removeprefix(ENGINE_PREFIX).lower()
        if option in known:
            engine[option] = text
        else:
            around[option] = text
    if around.pop("engines", "1") != "1":
        raise ValueError("data_parallel_size: an LLM has one engine; several are what `catenary up` is for")
    if directory := around.pop("hf_hub_cache", ""):
        # Read when the hub's library is imported, which nothing has done that did not need it.
        os.environ.setdefault("HF_HUB_CACHE", directory)
    template = around.pop("chat_template", "")
    if around:
        raise ValueError(f"{', '.join(sorted(around))}: an LLM has no server")
    return EngineOptions({**engine, **own}, Path(template) if template else None)


def make_config(options: Mapping[str, Any]) -> EngineConfig:
    """The engine's options by their names in docs/configuration.md. Raises ValueError, one line."""
    try:
        return EngineConfig(**options)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = str(problem["loc"][0]) if problem["loc"] else ""
        text = reason(name, EngineConfig.model_fields.get(name), problem)
    shown = f"{name}={options[name]!r}: " if name in options else ""
    raise ValueError(f"{shown}{text[:1].lower()}{text[1:]}{_why(name, options.get(name))}")


def _ask(launch: Launch, name: str, value: Any, known: Set[str]) -> bool:
    """Asks the launch for what an option of vLLM's means here.

    False: it is an option of ours, and vLLM has no such value. Raises ValueError, UnknownNameError.
    """
    if name in _IDLE:
        return True
    if name in _NETWORK:
        raise UnknownNameError(f"LLM has no option {name!r}: there is no network in it")
    option = _BY_NAME.get(name)
    if option is None:
        names = {*known, *_BY_NAME, *_IDLE, "seed", "progress"}
        raise UnknownNameError(f"LLM has no option {name!r}{near(name, names)}")
    try:
        option.apply(launch, _flag(name), _text(value))
    except ConfigError as error:
        if name in known:
            return False
        raise ValueError(_in_python(str(error))) from None
    return True


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return _FLAGS[value]
    if isinstance(value, dict):
        return json.dumps(value, default=str)
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _why(name: str, value: Any) -> str:
    """What `catenary vllm-serve` says of a value that the engine does not know, if it is one of vLLM's."""
    option = _BY_NAME.get(name)
    if option is None or value is None:
        return ""
    try:
        option.apply(Launch(), _flag(name), _text(value))
    except ConfigError as error:
        return f"; {str(error).partition(': ')[2]}"
    return ""


def _in_python(line: str) -> str:
    """A message about the flag `--some-option`, with the name of the keyword argument `some_option`."""
    name, space, rest = line.removeprefix("--").partition(" ")
    name, colon, behind = name.partition(":")
    return f"{name.replace('-', '_')}{colon}{behind}{space}{rest}"


_BY_NAME: Mapping[str, ServeOption] = {
    name[2:].replace("-", "_"): option
    for option in SERVE_OPTIONS
    for name in option.names
    if name.startswith("--")
}
