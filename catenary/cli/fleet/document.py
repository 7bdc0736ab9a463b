"""GetFleet of several routers as one object for JSON. Its keys are the names in router.proto."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message

from catenary.cli.router_polling import RouterView
from catenary.v1 import router_pb2

# What the protos say that UNSPECIFIED stands for.
_UNSPECIFIED = {"EngineRole": "both", "BreakerState": "closed", "PriorityClass": "default"}
_APART = ("engines", "lanes")


def fleet_document(views: Iterable[RouterView]) -> dict[str, Any]:
    """One object: `routers` (with `error`, null of one that answered), `engines` and `lanes`, each of these
    with the address of the `router` that says so. All keys are always there; what a router that is away
    would say is null."""
    document: dict[str, list[dict[str, Any]]] = {"routers": [], "engines": [], "lanes": []}
    for view in views:
        known = plain(view.fleet or router_pb2.GetFleetResponse())
        for part in _APART:
            document[part] += [{"router": view.address, **entry} for entry in known.pop(part)]
        said = known if view.fleet is not None else dict.fromkeys(known)
        document["routers"].append({"address": view.address, **said, "error": view.error})
    return document


def plain(message: Message) -> dict[str, Any]:
    """A message with all its fields, as JSON has them; numbers stay numbers, enums are words."""
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def word(enum: EnumDescriptor, number: int) -> str:
    """A value of an enum in lower case and without the enum's prefix; `unknown` for a later revision's."""
    if number == 0 and enum.name in _UNSPECIFIED:
        return _UNSPECIFIED[enum.name]
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    value = enum.values_by_number.get(number)
    return "unknown" if value is None else value.name.removeprefix(prefix).lower()


def _value(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.is_repeated:
        return [_scalar(field, entry) for entry in value]
    if field.message_type is None and field.has_presence and not message.HasField(field.name):
        return None
    return _scalar(field, value)


def _scalar(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    return value if field.enum_type is None else word(field.enum_type, value)
