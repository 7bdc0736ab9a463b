"""The caller of a request and the headers that say how it is to be treated, for admission and limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.datastructures import Headers

from catenary.v1 import common_pb2
from gateway.errors import ApiError, bad_request

SESSION_ID = "x-session-id"
MAX_WAIT_MS = "x-max-wait-ms"
PRIORITY_CLASS = "x-priority-class"
# Of headers: their size is bounded by --max-header-kib, and no wait is allowed to be longer than a day.
MAX_SESSION_ID = 256
LONGEST_WAIT_MS = 86_400_000
_CLASSES: dict[str, common_pb2.PriorityClass.ValueType] = {
    "system": common_pb2.PRIORITY_CLASS_SYSTEM,
    "interactive": common_pb2.PRIORITY_CLASS_INTERACTIVE,
    "default": common_pb2.PRIORITY_CLASS_DEFAULT,
    "bulk": common_pb2.PRIORITY_CLASS_BULK,
}
PRIORITY_CLASSES = tuple(_CLASSES)


@dataclass(frozen=True, slots=True)
class Caller:
    """`owner`: a name for the API key, empty without keys. `session_id`, `max_wait_ms`, `priority_class`:
    what the headers ask for. `bulk`: it is a request of a batch."""

    owner: str = ""
    session_id: str = ""
    max_wait_ms: int | None = None
    priority_class: common_pb2.PriorityClass.ValueType = common_pb2.PRIORITY_CLASS_UNSPECIFIED
    bulk: bool = False


_NOBODY = Caller()
_current: ContextVar[Caller] = ContextVar("caller", default=_NOBODY)


def current_caller() -> Caller:
    """The caller whose request this task works on; an anonymous one outside of a request."""
    return _current.get()


@contextmanager
def calling(caller: Caller) -> Iterator[None]:
    """Work inside, and that of tasks made there, is done for `caller`."""
    token = _current.set(caller)
    try:
        yield
    finally:
        _current.reset(token)


def read_caller(headers: Headers, owner: str, *, operator: bool) -> Caller:
    """The caller of a request. `operator`: its key may ask for the class system.

    Raises ApiError: 400 for a header that makes no sense, 403 for a class that the key may not ask for."""
    session_id = _only(headers, SESSION_ID) or ""
    if len(session_id) > MAX_SESSION_ID:
        raise bad_request(f"The header {SESSION_ID} is longer than {MAX_SESSION_ID} characters.", SESSION_ID)
    name = _only(headers, PRIORITY_CLASS)
    if name is not None and name not in _CLASSES:
        raise bad_request(
            f"The header {PRIORITY_CLASS} must be one of: {', '.join(_CLASSES)}.", PRIORITY_CLASS
        )
    if name == "system" and not operator:
        raise ApiError(
            403,
            "This key may not ask for the class system; see the gateway's option operator-key.",
            kind="permission_error",
            code="class_not_allowed",
            param=PRIORITY_CLASS,
        )
    wanted = common_pb2.PRIORITY_CLASS_UNSPECIFIED if name is None else _CLASSES[name]
    return Caller(owner, session_id, _max_wait_ms(_only(headers, MAX_WAIT_MS)), wanted)


def _only(headers: Headers, name: str) -> str | None:
    """The value of a header that stands once at the most, without the blanks around it."""
    values = headers.getlist(name)
    if len(values) > 1:
        raise bad_request(f"The header {name} stands more than once.", name)
    return values[0].strip(" \t") if values else None


def _max_wait_ms(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) <= LONGEST_WAIT_MS):
        raise bad_request(
            f"The header {MAX_WAIT_MS} must be a number of milliseconds, 0 to {LONGEST_WAIT_MS}.", MAX_WAIT_MS
        )
    return int(text)
