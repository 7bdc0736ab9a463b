"""GetFleet of several routers as one object for JSON. Its keys are the names in router.proto."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import Message

from catenary.v1 import router_pb2
from catenary_apps.cli.enum_words import enum_word
from catenary_apps.cli.router_polling import RouterView

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
    return value if field.enum_type is None else enum_word(field.enum_type, value)
