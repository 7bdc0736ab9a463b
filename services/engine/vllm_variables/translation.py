"""From the environment of a vLLM on Gaudi to our options and warnings."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from catenary.config import Given, ServiceConfig, load
from catenary.nearest import near
from services.engine.vllm_variables.absent import ROWS as ABSENT
from services.engine.vllm_variables.buckets import ROWS as BUCKETS
from services.engine.vllm_variables.cpu import ROWS as CPU
from services.engine.vllm_variables.execution import ROWS as EXECUTION
from services.engine.vllm_variables.hpu import ROWS as HPU
from services.engine.vllm_variables.memory import ROWS as MEMORY
from services.engine.vllm_variables.rows import Row, Status, Variables
from services.engine.vllm_variables.serving import ROWS as SERVING

VARIABLES: Final[tuple[Row, ...]] = (
    *BUCKETS,
    *MEMORY,
    *EXECUTION,
    *CPU,
    *HPU,
    *SERVING,
    *ABSENT,
)
# Variables that begin so are vLLM's or the Gaudi bridge's, and are spoken of if no row knows them.
PREFIXES: Final = ("VLLM_", "PT_HPU_")
_RULES: Final = tuple(dict.fromkeys(row.rule for row in VARIABLES if row.rule is not None))


@dataclass(frozen=True, slots=True)
class Translation:
    """Engine and deployment options by name, each with the variable that it comes from, and a line for every
    variable that has no effect or not the one that it seems to have."""

    options: Mapping[str, Given]
    warnings: tuple[str, ...]


def translate(environment: Mapping[str, str], own: Mapping[str, Any] | None = None) -> Translation:
    """Read the variables of the table.

    `own` is what the operator gave by our own options: those win, and options that go with them are left
    out. Raises ConfigError, one line that names the variable, for a value that cannot be read. Values are
    never repeated in warnings: some are secrets.
    """
    variables = Variables(environment, own or {})
    for rule in _RULES:
        rule(variables)
    for name in sorted(environment):
        if environment[name].strip():
            _speak_of(name, variables)
    return Translation(dict(variables.options), tuple(variables.warnings))


def row_of(name: str) -> Row | None:
    """Return the row that speaks of a variable; an exact name goes before a pattern."""
    exact = next((row for row in VARIABLES if name in row.names), None)
    return exact or next((row for row in VARIABLES if row.matches(name)), None)


def _speak_of(name: str, variables: Variables) -> None:
    row = row_of(name)
    if row is None:
        if name.startswith(PREFIXES):
            variables.warn(f"{name} is not known here and has no effect{_hint(name)}")
    elif not row.status.has_effect and row.rule is None:
        verb = "has no effect" if row.status is Status.NOT_NEEDED else "has no effect, its equivalent is here"
        variables.warn(f"{name} {verb}: {row.note.replace('`', '')}")


def _hint(name: str) -> str:
    known = (name for row in VARIABLES for name in row.names if "*" not in name)
    return near(name, known, likeness=0.85, quoted=False)


T = TypeVar("T", bound=ServiceConfig)


def load_moved(
    cls: type[T],
    argv: Sequence[str] | None,
    *,
    prog: str,
    beside: str = "",
    taken: Collection[str] = (),
) -> tuple[T, tuple[str, ...]]:
    """Read options as `catenary.config.load` does, with vLLM's variables between our own and the defaults.

    Returns them with the warnings for the log. `beside`: prefix of variables that also are the operator's own
    options, though of another program that inherits them; those of the options `taken` count for this program
    as well, below its own.
    """
    warnings: tuple[str, ...] = ()

    def fallback(own: Mapping[str, Any]) -> Mapping[str, Given]:
        nonlocal warnings
        inherited = {
            name.removeprefix(beside).lower(): value
            for name, value in os.environ.items()
            if beside and name.startswith(beside) and value
        }
        translation = translate(os.environ, inherited | dict(own))
        warnings = translation.warnings
        moved = {
            name: item
            for name, item in translation.options.items()
            if name in cls.model_fields and name not in inherited
        }
        return moved | {
            name: Given(value, beside + name.upper())
            for name, value in inherited.items()
            if name in taken and name not in own
        }

    return load(cls, argv, prog=prog, fallback=fallback), warnings


@dataclass(frozen=True, slots=True)
class Shared(Generic[T]):
    """A program's options, with the variable of each that comes from another program's, and the warnings."""

    config: T
    origins: Mapping[str, str]
    warnings: tuple[str, ...]


def load_shared(
    cls: type[T], argv: Sequence[str] | None, *, prog: str, prefix: str, apart: Collection[str] = ()
) -> Shared[T]:
    """Read options as `load_moved` does for another program, whose variables begin with `prefix`.

    Its variables count between our own and vLLM's, for every option that both have but those `apart`.
    """
    origins: dict[str, str] = {}
    warnings: tuple[str, ...] = ()

    def fallback(own: Mapping[str, Any]) -> Mapping[str, Given]:
        nonlocal warnings
        theirs = {
            name.removeprefix(prefix).lower(): Given(value, name)
            for name, value in os.environ.items()
            if name.startswith(prefix) and value
        }
        known = {name: item.value for name, item in theirs.items()} | dict(own)
        translation = translate(os.environ, known)
        warnings = translation.warnings
        found = {
            name: item
            for name, item in {**translation.options, **theirs}.items()
            if name in cls.model_fields and name not in own and name not in apart
        }
        origins.update({name: item.origin for name, item in found.items()})
        return found

    config = load(cls, argv, prog=prog, fallback=fallback)
    return Shared(config, origins, warnings)
