"""Small objects that several routes answer with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import msgspec
from starlette.responses import Response

T = TypeVar("T")


class Named(Protocol):
    """An object of a list."""

    id: str


N = TypeVar("N", bound=Named)


class Page(msgspec.Struct, Generic[T]):
    """A part of a list; the ids are those of its first and its last object."""

    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class Deleted(msgspec.Struct):
    """An object is no more."""

    id: str
    object: str
    deleted: bool = True


class Status(msgspec.Struct):
    """How the gateway is: ok, unavailable or draining."""

    status: str


class Version(msgspec.Struct):
    """The version of the software."""

    version: str


def page_of(found: Sequence[N], limit: int) -> Page[N]:
    """The first `limit` of the objects that were found."""
    shown = list(found[:limit])
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return Page(shown, first, last, len(found) > limit)


def json_response(value: msgspec.Struct, status: int = 200) -> Response:
    """One object."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
