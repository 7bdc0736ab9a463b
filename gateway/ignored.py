"""Fields of a request that were taken and have no effect here: a header of the answer names them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

IGNORED = "x-catenary-ignored"
# Of a response header: proxies and clients take some KiB of headers, so it stays below four.
MAX_NAMES = 32
_MAX_NAME_LENGTH = 100
_MORE = "..."
_KEY = "catenary.ignored"
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def field_path(parts: Sequence[int | str], most: int = 8) -> str:
    """`messages.0.content`: a field by the names and places that lead to it, at most `most` of them.

    There is nothing in it that could not be a name."""
    shown = [part if _NAME.fullmatch(part) else "?" for part in map(str, parts[:most])]
    return ".".join(shown)[:_MAX_NAME_LENGTH]


class IgnoredFields:
    """Fields of a request without effect. `lenient`: unknown fields are ignored, not refused."""

    def __init__(self, *, lenient: bool = False) -> None:
        self.lenient = lenient
        self._names: dict[str, None] = {}

    @property
    def names(self) -> list[str]:
        """The fields in the order in which they were found, each once; a last one, `...`, stands for more."""
        return list(self._names)

    def note(self, *parts: int | str) -> None:
        """Take in a field, by its path."""
        if len(self._names) < MAX_NAMES:
            self._names[field_path(parts)] = None
        else:
            self._names[_MORE] = None


_current: ContextVar[IgnoredFields | None] = ContextVar("ignored", default=None)


def current_ignored() -> IgnoredFields:
    """The ignored fields of the request that this task works on; outside of a request, a new empty record."""
    found = _current.get()
    return IgnoredFields() if found is None else found


@contextmanager
def noting(ignored: IgnoredFields) -> Iterator[IgnoredFields]:
    """Fields ignored inside, and in tasks made there, are noted in `ignored`."""
    token = _current.set(ignored)
    try:
        yield ignored
    finally:
        _current.reset(token)


class IgnoredFieldsLayer:
    """ASGI middleware: each request has its own ignored fields, which `ignored_header` finds in its scope.

    The header is added where an answer's head is written (RequestContext): a middleware that wrapped `send`
    would be called for every chunk of a stream.
    """

    def __init__(self, app: ASGIApp, *, lenient: bool) -> None:
        self._app = app
        self._lenient = lenient

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ignored = scope[_KEY] = IgnoredFields(lenient=self._lenient)
        with noting(ignored):
            await self._app(scope, receive, send)


def ignored_header(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The header that names what was ignored of a request, by now; empty if nothing was."""
    found: IgnoredFields | None = scope.get(_KEY)
    if found is None or not found.names:
        return []
    return [(IGNORED.encode(), ", ".join(found.names).encode())]
