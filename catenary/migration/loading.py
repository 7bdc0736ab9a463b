"""Options of a program that vLLM's variables count for as well."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from catenary.config import Given, ServiceConfig, load
from catenary.migration.translation import translate

T = TypeVar("T", bound=ServiceConfig)


def load_moved(
    cls: type[T], argv: Sequence[str] | None, *, prog: str, beside: str = ""
) -> tuple[T, tuple[str, ...]]:
    """Read options as `catenary.config.load` does, with vLLM's variables between our own and the defaults.

    Returns them with the warnings for the log. `beside`: prefix of variables that also are the operator's own
    options, though of another program that inherits them.
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
        return {
            name: item
            for name, item in translation.options.items()
            if name in cls.model_fields and name not in inherited
        }

    return load(cls, argv, prog=prog, fallback=fallback), warnings
