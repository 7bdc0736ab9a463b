"""The description of a route."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.http.query import Parameter
from gateway.schemas.base import RequestModel

JSON = "application/json"
ALWAYS = (400, 401, 403, 408, 431, 500)
"""Statuses of errors that every route can answer with: a bad head of the request, a key, a host name."""
STORED = (404, 503, 507)
"""Those of routes to something stored."""
READS = (413, 415, 429, 503)
"""Those of routes that read a body."""
ASKS = (*READS, 404, 504)
"""Those of routes that ask a model."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A route's operation.

    Fields:
        summary: one line.
        answers: for each status of success, and of failure without the envelope: the msgspec type that is
            written, a tuple of types of which one is, or None for an answer without a body.
        bodies: the models as one of which a JSON body is read.
        further: a model and the names of those of its fields that a body has besides its own.
        form: the type of a multipart/form-data body instead.
        event: the type or types of an event's data, where the answer may be a stream.
        media_type: of the answers.
        query: parameters in the URL.
        fails: statuses of errors besides those of ALWAYS.
    """

    summary: str
    answers: Mapping[int, Any]
    bodies: Sequence[type[RequestModel]]
    further: tuple[type[RequestModel], Collection[str]] | None
    form: Any
    event: Any
    media_type: str
    query: Sequence[Parameter]
    fails: Iterable[int]


def operation(
    summary: str,
    answer: Any,
    *bodies: type[RequestModel],
    further: tuple[type[RequestModel], Collection[str]] | None = None,
    form: Any = None,
    event: Any = None,
    media_type: str = JSON,
    query: Sequence[Parameter] = (),
    fails: Iterable[int] = (),
    also: Mapping[int, Any] | None = None,
) -> Operation:
    """The operation of a route. `answer`: the type of a 200; `also`: those of further statuses that have no
    error envelope. The others are fields of Operation."""
    return Operation(
        summary, {200: answer, **(also or {})}, bodies, further, form, event, media_type, query, fails
    )
