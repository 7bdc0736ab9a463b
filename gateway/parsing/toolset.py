"""The functions that a model may call, as the parsers need them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.parsing.schema_types import parameter_types

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""The form of a function's name."""


@dataclass(frozen=True, slots=True)
class ToolSet:
    """Schemas of the parameters by function. `allowed`: those that may be called; None: any."""

    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    allowed: frozenset[str] | None = None
    single: bool = False
    """At most one call is wanted."""

    def accepts(self, name: str, *, known: bool) -> bool:
        """Whether a call of `name` is one. A model may invent a name: that is for the client to answer,
        unless the call has no marker (`known`), where only a function that exists tells a call from text."""
        if self.allowed is not None:
            return name in self.allowed
        return name in self.schemas if known else NAME.fullmatch(name) is not None

    def knows(self, function: str, parameter: str) -> bool:
        """Whether the function has a parameter of this name, or its schema does not list them."""
        properties = self.schemas.get(function, {}).get("properties")
        return parameter in properties if isinstance(properties, Mapping) else True

    def types(self, function: str, parameter: str) -> frozenset[str]:
        """JSON types of a parameter; empty where nothing is said."""
        return parameter_types(self.schemas.get(function, {}), parameter)
