"""Classes of parameters that say of an unknown name what is meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

from catenary.nearest import near
from catenary.parameters import UnknownNameError

C = TypeVar("C", bound=type)

Absent = Mapping[str, tuple[tuple[Any, ...], str]]
"""Names of vLLM's that a class does not have: which values ask for nothing, and why others are refused."""


def names_what_is_near(cls: C) -> C:
    """Have a dataclass refuse an argument that it does not know with the one that is meant, perhaps."""
    return _checked(cls, {})


def lacks(absent: Absent) -> Callable[[C], C]:
    """The same of a class that lacks some of vLLM's, which may be given if they ask for nothing."""
    return lambda cls: _checked(cls, absent)


def _checked(cls: C, absent: Absent) -> C:
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]
    names = [field.name for field in fields(cls)]

    @wraps(init)
    def checked(self: Any, *arguments: Any, **given: Any) -> None:
        for name in [name for name in given if name not in names]:
            if name not in absent:
                raise UnknownNameError(f"{cls.__name__} has no parameter {name!r}{near(name, names)}")
            neutral, reason = absent[name]
            if (value := given.pop(name)) is not None and value not in neutral:
                raise ValueError(f"{cls.__name__} has no {name}: {reason}")
        init(self, *arguments, **given)

    cls.__init__ = checked  # type: ignore[misc]
    return cls
