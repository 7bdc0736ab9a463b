"""The models of a deployment: how the options name them, and what each is served for."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from catenary.config import ConfigError, expected_one_of
from catenary_apps.up.config import UpConfig

TASKS = ("auto", "generate", "embed", "score", "classify")
QUANTIZATIONS = ("none", "int8", "int4")

# Not the beginning of a path. Lists of options are divided at commas.
_NAME = re.compile(r"(?!~|/|\.\.?/)[^\s=,][^=,\x00-\x1f\x7f]{0,255}(?<!\s)")


@dataclass(frozen=True, slots=True)
class WantedModel:
    """A model as the options name it. `name` None: that of its source."""

    source: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A model that is prepared. `task` is what the engine is told; `serves` the task that comes of it.

    quantization: of its weights; None: what the engine finds among its own options.
    """

    directory: Path
    name: str
    task: str = "auto"
    serves: str = "generate"
    quantization: str | None = None

    @property
    def generates(self) -> bool:
        """Whether it is served to generate."""
        return self.serves == "generate"


def wanted_models(config: UpConfig) -> tuple[WantedModel, ...]:
    """Return the models that `--model` names, each as SOURCE or NAME=SOURCE. Raises StartRefused."""
    models = tuple(_wanted(text) for text in config.model)
    check_values(config)
    if config.served_model_name is None:
        return models
    if len(models) > 1:
        raise ConfigError("--served-model-name is for one model; write several as --model NAME=SOURCE")
    return (WantedModel(models[0].source, config.served_model_name),)


def check_values(config: UpConfig) -> None:
    """Check the words of options whose names are checked once models are known. Raises StartRefused."""
    for option, texts, known in (
        ("--quantization", config.quantization, QUANTIZATIONS),
        ("--task", config.task, TASKS),
    ):
        for text in texts:
            word = text.rpartition("=")[2]
            if word not in known:
                raise ConfigError(f"{option} {text!r}: {expected_one_of(word, known)}")


def tasks_of(config: UpConfig, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the task of each model, by `--task`: TASK for a single one, else NAME=TASK.

    Raises StartRefused.
    """
    check_values(config)
    tasks = dict.fromkeys(names, "auto")
    if len(tasks) < len(names):
        raise ConfigError("--model: two models have one name; write them as NAME=SOURCE")
    for text in config.task:
        name, equals, task = text.rpartition("=")
        if not equals:
            if len(names) > 1:
                raise ConfigError("--task: with several models, write NAME=TASK")
            name = names[0]
        if name not in tasks:
            raise ConfigError(f"--task: no model has the name {name!r}")
        tasks[name] = task
    return tuple(tasks.values())


def aliases_of(config: UpConfig, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the further names of models by `--model-alias`, each as ALIAS=NAME. Raises StartRefused."""
    found: dict[str, str] = {}
    for text in config.model_alias:
        alias, equals, name = text.partition("=")
        if not equals and len(names) > 1:
            raise ConfigError("--model-alias: with several models, write ALIAS=NAME")
        name = name if equals else names[0]
        if name not in names:
            raise ConfigError(f"--model-alias: no model has the name {name!r}")
        if not _NAME.fullmatch(alias):
            raise ConfigError(f"--model-alias: {alias!r} is no name")
        if alias in found or alias in names:
            raise ConfigError(f"--model-alias: the name {alias!r} is there twice")
        found[alias] = name
    return tuple(f"{alias}={name}" for alias, name in found.items())


def quantizations_of(config: UpConfig, names: tuple[str, ...]) -> tuple[str | None, ...]:
    """Return the quantization of each model, by `--quantization`. Raises StartRefused."""
    check_values(config)
    named: dict[str, str] = {}
    others: str | None = None
    for text in config.quantization:
        name, equals, value = text.rpartition("=")
        if equals and name not in names:
            raise ConfigError(f"--quantization: no model has the name {name!r}")
        if name in named or (not equals and others is not None):
            raise ConfigError(f"--quantization: {name or 'a value without a name'} is there twice")
        if equals:
            named[name] = value
        else:
            others = value
    return tuple(named.get(name, others) for name in names)


def served_task(directory: Path, task: str) -> str:
    """Return the task that a prepared model is served for.

    Raises StartRefused for a task that it cannot do.
    """
    # Only the command line may import a service, and only when it is needed.
    from services.engine.model import ModelError, find_task, read_config

    try:
        return find_task(directory, read_config(directory), task).value
    except ModelError as error:
        raise ConfigError(str(error)) from None


def check_sources(models: Sequence[WantedModel]) -> None:
    """Check that each model's source exists, before anything is prepared. Raises ConfigError."""
    from services.engine.model import UnknownModelError, resolve_source

    for model in models:
        try:
            resolve_source(model.source)
        except UnknownModelError as error:
            raise ConfigError(f"--model: {error}") from None


def check_length(model: str, task: str, longest: int) -> None:
    """Check that a model on this disk that generates knows sequences of `longest` tokens, prepared or not.

    A model of a hub, one whose task is another, and a config that cannot be read are left to the engine.
    Raises StartRefused.
    """
    from services.engine.model import (
        ModelError,
        SourceKind,
        Task,
        find_config,
        find_task,
        longest_context,
        resolve_source,
    )

    try:
        if resolve_source(model).kind not in (SourceKind.DIRECTORY, SourceKind.GGUF):
            return
        config, _, directory = find_config(model, progress=lambda _: None)
        generates = find_task(directory or Path(os.devnull), config, task) is Task.GENERATE
        limit = longest_context(config)
    except ModelError:
        return
    if generates and limit is not None and longest > limit:
        raise ConfigError(f"{model}: max-model-len {longest} exceeds the model's context of {limit} tokens")


def _wanted(text: str) -> WantedModel:
    name, equals, source = text.partition("=")
    # A path may have an equals sign; one below a home directory begins with `~`, which is no name.
    if not equals or not _NAME.fullmatch(name) or os.path.exists(text):
        return WantedModel(text)
    if not source:
        raise ConfigError(f"--model {name}=: the model's source is missing")
    return WantedModel(source, name)
