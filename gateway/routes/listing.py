"""Stored objects as answers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.responses import JSONResponse, Response


def json_response(value: msgspec.Struct) -> Response:
    """One object."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def listing(found: Sequence[msgspec.Struct], limit: int) -> Response:
    """A page of `limit` objects at the most; `found` has one more if there are more."""
    data = msgspec.to_builtins(found[:limit])
    return JSONResponse(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(found) > limit,
        }
    )
