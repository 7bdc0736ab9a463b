"""OpenAPI document, derived from what the routes read and write."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import Any, get_origin

import msgspec
import pydantic.json_schema
from msgspec import UNSET, inspect

from gateway.auth import (
    LONGEST_WAIT_MS,
    MAX_SESSION_ID,
    MAX_WAIT_MS,
    PRIORITY_CLASS,
    PRIORITY_CLASSES,
    SESSION_ID,
)
from gateway.errors import ErrorEnvelope
from gateway.limits.limiter import LIMIT_HEADERS
from gateway.routing import ALWAYS, JSON, DescribedRoute, Operation, Routes
from gateway.schemas.base import RequestModel
from gateway.schemas.ignored import IGNORED

Schema = dict[str, Any]
_PLACE = "#/components/schemas/"


class Components:
    """Components of the document: all schemas, and references to them."""

    def __init__(self, answers: Sequence[Any], requests: Sequence[type[RequestModel]]) -> None:
        """Collect the schemas of `answers` (msgspec types that are written) and `requests` (models)."""
        self.schemas: dict[str, Schema] = {}
        self._answers = dict(zip(answers, self._add_answers(answers), strict=True))
        self._requests = self._add_requests(requests)

    def answer(self, written: Any) -> Schema:
        """Return the schema of a type that is written, or of a tuple of alternative types."""
        if isinstance(written, tuple):
            return {"anyOf": [self._answers[alternative] for alternative in written]}
        schema: Schema = self._answers[written]
        return schema

    def request(self, model: type[RequestModel]) -> Schema:
        """Return the schema of a model that is read."""
        return self._requests[model]

    def with_fields(
        self, model: type[RequestModel], other: type[RequestModel], names: Collection[str]
    ) -> Schema:
        """Return the schema of a model that has the named fields of another one in addition to its own."""
        own, lender = (self._definition(self.request(each)) for each in (model, other))
        lent = {name: schema for name, schema in lender["properties"].items() if name in names}
        return {**own, "properties": {**lent, **own["properties"]}}

    def _definition(self, reference: Schema) -> Schema:
        return self.schemas[reference["$ref"].removeprefix(_PLACE)]

    def _add_answers(self, answers: Sequence[Any]) -> Sequence[Schema]:
        structs = list(dict.fromkeys(_structs(inspect.multi_type_info(answers))))
        found, components = msgspec.json.schema_components(
            [*answers, *structs], ref_template=_PLACE + "{name}"
        )
        for struct, reference in zip(structs, found[len(answers) :], strict=True):
            required = _always_written(struct)
            schema = components[reference["$ref"].removeprefix(_PLACE)]
            # A tag comes first, and is always written.
            tag = [name for name in schema.get("required", ()) if name == _config(struct).tag_field]
            schema["required"] = [*tag, *required]
        self.schemas |= components
        return found[: len(answers)]

    def _add_requests(self, models: Sequence[type[RequestModel]]) -> dict[type[RequestModel], Schema]:
        template = _PLACE + "{model}"
        references, defined = pydantic.json_schema.models_json_schema(
            [(model, "validation") for model in models], ref_template=template
        )
        definitions: dict[str, Schema] = defined.get("$defs", {})
        # A name may stand for a type that is read and for one that is written.
        names = {
            f"{_PLACE}{name}": f"{_PLACE}{name}Request" if name in self.schemas else f"{_PLACE}{name}"
            for name in definitions
        }
        for name, schema in definitions.items():
            self.schemas[names[f"{_PLACE}{name}"].removeprefix(_PLACE)] = _renamed(schema, names)
        return {model: _renamed(references[model, "validation"], names) for model in models}


def _structs(types: Iterable[inspect.Type]) -> Iterator[type[msgspec.Struct]]:
    """Yield the structs in types, however deep."""
    seen: set[type[msgspec.Struct]] = set()
    waiting: list[Any] = list(types)
    while waiting:
        node = waiting.pop()
        if isinstance(node, inspect.StructType):
            if node.cls in seen:
                continue
            seen.add(node.cls)
            yield node.cls
            waiting += [field.type for field in node.fields]
        elif isinstance(node, inspect.UnionType):
            waiting += node.types
        elif isinstance(node, inspect.ListType):
            waiting.append(node.item_type)
        elif isinstance(node, inspect.DictType):
            waiting.append(node.value_type)


def _always_written(struct: type[msgspec.Struct]) -> list[str]:
    """Return the fields that no encoding leaves out; msgspec's own schema lists those that decoding needs."""
    omits = _config(struct).omit_defaults
    return [
        field.encode_name
        for field in msgspec.structs.fields(struct)
        if field.default is not UNSET and not (omits and not field.required)
    ]


def _config(struct: type[msgspec.Struct]) -> msgspec.structs.StructConfig:
    # Of a generic one with its parameters, that of the class itself.
    origin: type[msgspec.Struct] = get_origin(struct) or struct
    return origin.__struct_config__


def _renamed(node: Any, names: dict[str, str]) -> Any:
    if isinstance(node, list):
        return [_renamed(item, names) for item in node]
    if not isinstance(node, dict):
        return names.get(node, node) if isinstance(node, str) else node
    return {key: _renamed(value, names) for key, value in node.items()}


Described = dict[str, dict[str, Any]]

_REQUEST: Described = {
    PRIORITY_CLASS: {
        "description": "The queue in which it waits; system needs an operator's key",
        "schema": {"type": "string", "enum": list(PRIORITY_CLASSES)},
    },
    MAX_WAIT_MS: {
        "description": "Longest wait for an engine in milliseconds; then 408",
        "schema": {"type": "integer", "minimum": 0, "maximum": LONGEST_WAIT_MS},
    },
    SESSION_ID: {
        "description": "Names the session; counts instead of prompt_cache_key and user",
        "schema": {"type": "string", "maxLength": MAX_SESSION_ID},
    },
}
_TOLD = {
    "limit": ("in a minute", {"type": "integer", "minimum": 0}),
    "remaining": ("left in this minute", {"type": "integer", "minimum": 0}),
    "reset": ("seconds until the minute is over, as in 12.500s", {"type": "string"}),
}


def _limit(header: str) -> dict[str, Any]:
    _, _, what, name = header.split("-")
    meaning, schema = _TOLD[what]
    return {"description": f"Where keys have a limit of {name}: {meaning}", "schema": schema}


_ANSWER: Described = {header: _limit(header) for header in LIMIT_HEADERS}
_IGNORED: Described = {
    IGNORED: {
        "description": "Fields of the request that were taken and have no effect",
        "schema": {"type": "string"},
    }
}


def request_headers(described: Operation) -> list[dict[str, Any]]:
    if not described.limited:
        return []
    return [{"name": name, "in": "header", "required": False, **rest} for name, rest in _REQUEST.items()]


def answer_headers(described: Operation, status: int) -> Described:
    """Return the headers of an operation's answers with this status."""
    if not described.limited or status not in (200, 429):
        return {}
    return _ANSWER | _IGNORED if status == 200 else _ANSWER


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
    """Return the OpenAPI document of the routes that describe themselves."""
    routes = [(route, route.operation) for router in routers for route in router.all if route.described]
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
    parameters += request_headers(described)
    made: dict[str, Any] = {
        "summary": described.summary,
        "operationId": f"{method.lower()}_{re.sub(r'[^a-z0-9]+', '_', route.path).strip('_')}",
        "responses": _responses(described, components),
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


def _responses(described: Operation, components: Components) -> dict[str, Any]:
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
        if headers := answer_headers(described, status):
            response["headers"] = headers
    return {str(status): responses[status] for status in sorted(responses)}
