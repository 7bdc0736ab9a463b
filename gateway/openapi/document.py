"""The document itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

from gateway.errors import ErrorEnvelope
from gateway.openapi.components import Components
from gateway.openapi.headers import answer_headers, request_headers
from gateway.openapi.operation import ALWAYS, JSON, Operation
from gateway.openapi.routing import DescribedRoute, Routes

VERSION = "3.1.0"
_EVENTS = "text/event-stream"
_PLACEHOLDER = re.compile(r"\{(\w+)(?::path)?\}")
_FAILURES = {
    400: "The request is wrong; `param` names what is",
    401: "No or a wrong API key, where the server has keys",
    403: "The server does not answer under this host name, or the key may not ask for this",
    404: "No such model or object",
    408: "The request did not arrive or no engine had room in time, or the answer was not read",
    409: "It is in use",
    413: "The body is too large",
    415: "The body's media type is not supported",
    429: "Queues are full, or the API key has used its limits; see Retry-After",
    431: "The request's head is too large",
    500: "A defect of the server",
    503: "Nothing can serve the request now; see Retry-After",
    504: "The server's time limit passed",
    507: "The server's disk has no room for it",
}


def document(routers: Iterable[Routes], version: str) -> dict[str, Any]:
    """The OpenAPI document of the routes that describe themselves."""
    routes = [
        (route, route.described) for router in routers for route in router.all if route.described is not None
    ]
    components = _components([described for _, described in routes])
    paths: dict[str, dict[str, Any]] = {}
    for route, described in routes:
        path = _PLACEHOLDER.sub(r"{\1}", route.path)
        for method in sorted(route.methods or ()):
            paths.setdefault(path, {})[method.lower()] = _operation(route, method, described, components)
    return {
        "openapi": VERSION,
        "info": {"title": "Catenary", "version": version},
        "paths": paths,
        "components": {
            "schemas": components.schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # Keys are an option of the server, so none at all is a possibility.
        "security": [{}, {"key": []}],
    }


def _components(operations: Sequence[Operation]) -> Components:
    written: list[Any] = [ErrorEnvelope]
    for described in operations:
        for answer in (*described.answers.values(), described.event, described.form):
            if answer is not None:
                written += answer if isinstance(answer, tuple) else [answer]
    read = [model for described in operations for model in described.bodies]
    read += [described.further[0] for described in operations if described.further is not None]
    return Components(list(dict.fromkeys(written)), list(dict.fromkeys(read)))


def _operation(
    route: DescribedRoute, method: str, described: Operation, components: Components
) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PLACEHOLDER.findall(route.path)
    ]
    parameters += [
        {"name": parameter.name, "in": "query", "required": False, "schema": parameter.schema}
        for parameter in described.query
    ]
    parameters += request_headers(route.path) if method == "POST" else []
    made: dict[str, Any] = {
        "summary": described.summary,
        "operationId": f"{method.lower()}_{re.sub(r'[^a-z0-9]+', '_', route.path).strip('_')}",
        "responses": _responses(route.path, described, components),
    }
    if parameters:
        made["parameters"] = parameters
    if (body := _body(described, components)) is not None:
        made["requestBody"] = body
    return made


def _body(described: Operation, components: Components) -> dict[str, Any] | None:
    if described.form is not None:
        schema = components.answer(described.form)
        return {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    if not described.bodies:
        return None
    schemas = [
        components.request(model)
        if described.further is None
        else components.with_fields(model, *described.further)
        for model in described.bodies
    ]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"required": True, "content": {JSON: {"schema": schema}}}


def _responses(path: str, described: Operation, components: Components) -> dict[str, Any]:
    error = {"schema": components.answer(ErrorEnvelope)}
    responses: dict[int, dict[str, Any]] = {
        status: {"description": _FAILURES[status], "content": {JSON: error}}
        for status in {*ALWAYS, *described.fails} - described.answers.keys()
    }
    for status, answer in described.answers.items():
        responses[status] = {"description": HTTPStatus(status).phrase}
        if answer is not None:
            content = {described.media_type: {"schema": components.answer(answer)}}
            if described.event is not None:
                # Of the data of each event but the last one, [DONE].
                content[_EVENTS] = {"schema": components.answer(described.event)}
            responses[status]["content"] = content
    for status, response in responses.items():
        if headers := answer_headers(path, status):
            response["headers"] = headers
    return {str(status): responses[status] for status in sorted(responses)}
