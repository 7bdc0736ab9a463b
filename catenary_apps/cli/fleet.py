"""Run `catenary fleet`: print engines, lanes and routers as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from catenary.config import settings
from catenary.runtime import StartRefused
from catenary_apps.cli.output import load_options, refused
from catenary_apps.cli.router_options import RoutersOptions

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from catenary_apps.cli.routers import RouterView

_NAME = "catenary fleet"
_APART = ("engines", "lanes")


class FleetConfig(RoutersOptions):
    """Which routers to ask."""

    model_config = settings(prefix="CATENARY_FLEET_")


def fleet_document(views: Iterable[RouterView]) -> dict[str, Any]:
    """Return one object: `routers` (with `error`, null of one that answered), `engines` and `lanes`, each of
    these with the address of the `router` that says so. All keys are always there; what a router that is away
    would say is null."""
    # Here and below, not above: a wrong option is to be refused without waiting for gRPC to load.
    from catenary.v1 import router_pb2

    document: dict[str, list[dict[str, Any]]] = {"routers": [], "engines": [], "lanes": []}
    for view in views:
        known = plain(view.fleet or router_pb2.GetFleetResponse())
        for part in _APART:
            document[part] += [{"router": view.address, **entry} for entry in known.pop(part)]
        said = known if view.fleet is not None else dict.fromkeys(known)
        document["routers"].append({"address": view.address, **said, "error": view.error})
    return document


def plain(message: Message) -> dict[str, Any]:
    """Return a message with all its fields, as JSON has them; numbers stay numbers, enums are words."""
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
    from catenary_apps.cli.routers import enum_word

    return value if field.enum_type is None else enum_word(field.enum_type, value)


def run_fleet(argv: Sequence[str]) -> int:
    """Run `catenary fleet`: 1 if a router does not answer (it is in the JSON), 2 for wrong options."""
    config = load_options(FleetConfig, argv, prog=_NAME)
    try:
        views = asyncio.run(_ask(config))
    except StartRefused as error:
        return refused(_NAME, error)
    print(json.dumps(fleet_document(views), indent=2))
    away = [view for view in views if view.fleet is None]
    for view in away:
        print(f"{_NAME}: {view.address}: {view.error}", file=sys.stderr)
    return 1 if away else 0


async def _ask(config: FleetConfig) -> list[RouterView]:
    from catenary_apps.cli.routers import RouterPoller, find_routers

    async with RouterPoller(find_routers(config), timeout_s=config.timeout) as poller:
        return await poller.poll()
