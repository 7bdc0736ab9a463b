"""Options of a program that vLLM's variables count for as well."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from catenary.config import Given, ServiceConfig, load
from services.engine.vllm_variables.translation import translate

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
