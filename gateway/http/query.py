"""Parameters in a URL's query: strict, like those of a body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request

from catenary.nearest import near
from gateway.errors import bad_request

# Characters of a value: an id, a number or a word of a closed set.
_MAX_LENGTH = 512


class Parameter(Protocol):
    """A parameter that a route understands."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of its values."""


@dataclass(frozen=True, slots=True)
class Text:
    """Any text; `meaning` tells of what."""

    name: str
    meaning: str

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of its values."""
        return {"type": "string", "description": self.meaning, "maxLength": _MAX_LENGTH}

    def of(self, query: Mapping[str, str]) -> str | None:
        """Its value."""
        return query.get(self.name)


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer from `least` to `most`; `default` is what it means to leave it out, which is told unless it
    is `optional`."""

    name: str
    default: int
    least: int
    most: int
    optional: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of its values."""
        default = {} if self.optional else {"default": self.default}
        return {"type": "integer", "minimum": self.least, "maximum": self.most, **default}

    def of(self, query: Mapping[str, str]) -> int:
        """Its value. Raises ApiError 400."""
        text = query.get(self.name)
        if text is None:
            return self.default
        if not (
            text.isascii() and text.isdecimal() and len(text) <= 9 and self.least <= int(text) <= self.most
        ):
            raise bad_request(
                f"Invalid '{self.name}': must be an integer from {self.least} to {self.most}.", self.name
            )
        return int(text)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of `values`; if it is left out the first, or nothing if it is `optional`."""

    name: str
    values: Sequence[str]
    optional: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of its values."""
        default = {} if self.optional else {"default": self.values[0]}
        return {"type": "string", "enum": list(self.values), **default}

    def of(self, query: Mapping[str, str]) -> str:
        """Its value. Raises ApiError 400."""
        text = query.get(self.name, self.values[0])
        if text not in self.values:
            raise bad_request(f"Invalid '{self.name}': must be one of {', '.join(self.values)}.", self.name)
        return text


def query_of(
    request: Request, known: Sequence[Parameter], unsupported: Sequence[str] = ()
) -> Mapping[str, str]:
    """The parameters of a URL, each at most once. Raises ApiError 400.

    Args:
        request: the request.
        known: what is understood.
        unsupported: names that are refused as such, and not as unknown.
    """
    names = {parameter.name for parameter in known}
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        name = name.removesuffix("[]")
        if name in unsupported:
            raise bad_request(
                f"The parameter '{name}' is not supported by this server yet.", name, "unsupported_parameter"
            )
        if name not in names:
            raise bad_request(f"Unknown parameter in the URL{near(name, names)}.", None, "unknown_parameter")
        if name in found or len(value) > _MAX_LENGTH:
            raise bad_request(f"Invalid '{name}': given twice, or too long.", name)
        found[name] = value
    return found
