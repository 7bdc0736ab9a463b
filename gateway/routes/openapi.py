"""`GET /openapi.json`, and how the routes describe their bodies there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.responses import JSONResponse

from gateway.schemas.base import RequestModel

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES = {
    400: "The request is wrong",
    401: "No or a wrong API key",
    404: "No such model",
    413: "The body is too large",
    415: "The body is not JSON",
    429: "Queues are full; see Retry-After",
    503: "Nothing can serve the request now; see Retry-After",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": _ERROR}}}
    for status, text in _STATUSES.items()
}
"""The answers of every route other than success."""


def body_schema(model: type[RequestModel], others: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a body, with properties of other models beside its own."""
    schema = _schema(model)
    return {**schema, "properties": {**others, **schema["properties"]}}


def properties(model: type[RequestModel]) -> dict[str, Any]:
    """The schema of each of a model's fields."""
    found: dict[str, Any] = _schema(model)["properties"]
    return found


def described(summary: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a route decorator whose body is read by our own strict reader."""
    return {
        "summary": summary,
        "responses": ERRORS,
        "openapi_extra": {
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": schema}},
            }
        },
    }


def operation(model: type[RequestModel], summary: str, *others: type[RequestModel]) -> dict[str, Any]:
    """The same for a body that is one of the models."""
    bodies = [_schema(body) for body in (model, *others)]
    return described(summary, {"anyOf": bodies} if others else bodies[0])


def routes(app: FastAPI) -> APIRouter:
    """The route; it needs a key like any other."""
    router = APIRouter()

    @router.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(app.openapi())

    return router


def _schema(model: type[RequestModel]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    # The components are ours alone: FastAPI knows no request models, so the definitions go in line.
    inlined: dict[str, Any] = _inline(schema, schema.pop("$defs", {}))
    return inlined


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(definitions[node["$ref"].rsplit("/", 1)[1]], definitions)
    return {key: _inline(value, definitions) for key, value in node.items()}
