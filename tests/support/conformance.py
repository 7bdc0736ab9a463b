"""Whether answers are what the OpenAPI document says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator


class Conformance:
    """The document of a server."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._paths = document["paths"]
        self._components = document["components"]
        self._validators: dict[str, Draft202012Validator] = {}

    def check(self, method: str, path: str, status: int, content_type: str, body: bytes) -> None:
        """Compare an answer with what is written about its operation. Raises AssertionError or
        jsonschema.ValidationError.

        Args:
            method: of the request, in any case.
            path: of the operation, with placeholders.
            status: of the answer.
            content_type: the header; empty without a body.
            body: all of it.
        """
        operation = self._paths[path][method.lower()]
        assert str(status) in operation["responses"], (path, status, body[:300])
        content = operation["responses"][str(status)].get("content", {})
        if not content:
            assert not body, (path, body[:300])
            return
        kind = next((kind for kind in content if kind == content_type), content_type.partition(";")[0])
        assert kind in content, (path, status, content_type)
        for value in _values(kind, body):
            self._validator(content[kind]["schema"]).validate(value)

    def _validator(self, schema: dict[str, Any]) -> Draft202012Validator:
        key = json.dumps(schema)
        if key not in self._validators:
            self._validators[key] = Draft202012Validator({**schema, "components": self._components})
        return self._validators[key]


def _values(kind: str, body: bytes) -> Iterator[Any]:
    if kind == "application/json":
        yield json.loads(body)
    elif kind == "text/event-stream":
        parts = body.decode().split("\n\n")
        assert parts.pop() == "", "the stream ends with a blank line"
        for part in parts:
            *names, data = part.split("\n")
            assert data.startswith("data: ")
            assert all(name.startswith("event: ") for name in names)
            if data != "data: [DONE]":
                yield json.loads(data.removeprefix("data: "))
