"""Values of the protocol's enums as words for people and for JSON."""

from __future__ import annotations

from google.protobuf.descriptor import EnumDescriptor

# What the protos say that UNSPECIFIED stands for.
_UNSPECIFIED = {"EngineRole": "both", "BreakerState": "closed", "PriorityClass": "default"}


def enum_word(enum: EnumDescriptor, number: int) -> str:
    """A value of an enum in lower case and without the enum's prefix; `unknown` for a later revision's."""
    if number == 0 and enum.name in _UNSPECIFIED:
        return _UNSPECIFIED[enum.name]
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    value = enum.values_by_number.get(number)
    return "unknown" if value is None else value.name.removeprefix(prefix).lower()
