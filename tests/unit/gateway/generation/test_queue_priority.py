"""Class, tenant, session and longest wait of a request: what headers, keys and fields make of them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from starlette.datastructures import Headers

from catenary.v1 import common_pb2
from gateway import GatewayConfig
from gateway.auth import Caller, caller_of, read_caller, set_caller
from gateway.errors import ApiError
from gateway.generation.requests import Priorities

SYSTEM = common_pb2.PRIORITY_CLASS_SYSTEM
INTERACTIVE = common_pb2.PRIORITY_CLASS_INTERACTIVE
DEFAULT = common_pb2.PRIORITY_CLASS_DEFAULT
BULK = common_pb2.PRIORITY_CLASS_BULK
PRIORITIES = Priorities(-10, 10, max_wait_ms=7000)


@pytest.mark.parametrize(
    ("caller", "number", "tier", "expected"),
    [
        (Caller(), None, None, DEFAULT),
        (Caller(), None, "auto", DEFAULT),
        (Caller(), None, "priority", INTERACTIVE),
        (Caller(), None, "flex", BULK),
        (Caller(), -1, "flex", INTERACTIVE),
        (Caller(), 0, "priority", DEFAULT),
        (Caller(), 1, None, BULK),
        (Caller(bulk=True), -5, "priority", BULK),
        (Caller(priority_class=SYSTEM), 5, None, SYSTEM),
        (Caller(priority_class=BULK), None, "priority", BULK),
    ],
)
def test_classes(caller: Caller, number: int | None, tier: str | None, expected: int) -> None:
    assert PRIORITIES.queue_priority(caller, number, tier).priority_class == expected


def test_sessions_of_tenants_are_apart_and_bounded() -> None:
    def session(caller: Caller, body: str | None = None) -> str:
        return PRIORITIES.queue_priority(caller, None, None, body).session_id

    assert session(Caller()) == session(Caller(owner="a")) == ""
    first = session(Caller(owner="a"), "x" * 1000)
    assert 0 < len(first) <= 64
    assert session(Caller(owner="a"), "x" * 1000) == first != session(Caller(owner="b"), "x" * 1000)
    # The header goes first.
    assert session(Caller(owner="a", session_id="s"), "body") == session(Caller(owner="a"), "s")


def test_what_is_entered_in_a_sequence() -> None:
    spec = common_pb2.SequenceSpec()
    PRIORITIES.queue_priority(Caller("owner", "s", 5), 3).enter(spec)
    assert (spec.priority, spec.priority_class, spec.tenant) == (3, BULK, "owner")
    assert (len(spec.session_id), spec.max_wait_ms) == (32, 5)
    PRIORITIES.queue_priority(Caller(max_wait_ms=0), 0).enter(spec)
    assert spec.max_wait_ms == 0
    PRIORITIES.queue_priority(Caller(), 0).enter(spec)
    assert spec.max_wait_ms == 7000


def read(operator: bool = False, **headers: str) -> Caller:
    return read_caller(
        Headers({name.replace("_", "-"): value for name, value in headers.items()}), "me", operator=operator
    )


def test_headers() -> None:
    assert read() == Caller("me")
    caller = read(x_session_id="s", x_max_wait_ms="250", x_priority_class="bulk")
    assert caller == Caller("me", "s", 250, BULK)
    assert read(operator=True, x_priority_class="system").priority_class == SYSTEM


@pytest.mark.parametrize(
    ("headers", "status", "param"),
    [
        ({"x_session_id": "s" * 257}, 400, "x-session-id"),
        ({"x_max_wait_ms": "-1"}, 400, "x-max-wait-ms"),
        ({"x_max_wait_ms": "1e3"}, 400, "x-max-wait-ms"),
        ({"x_max_wait_ms": "9" * 5000}, 400, "x-max-wait-ms"),
        ({"x_max_wait_ms": "86400001"}, 400, "x-max-wait-ms"),
        ({"x_max_wait_ms": ""}, 400, "x-max-wait-ms"),
        ({"x_priority_class": "root"}, 400, "x-priority-class"),
        ({"x_priority_class": "system"}, 403, "x-priority-class"),
    ],
)
def test_bad_headers_are_refused_by_name(headers: dict[str, Any], status: int, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**headers)
    assert (caught.value.status, caught.value.param) == (status, param)


@pytest.mark.parametrize("name", ["x-session-id", "x-max-wait-ms", "x-priority-class"])
def test_a_header_that_comes_twice_is_not_half_ignored(name: str) -> None:
    headers = Headers(raw=[(name.encode(), b"bulk"), (name.encode(), b"bulk")])
    with pytest.raises(ApiError) as caught:
        read_caller(headers, "me", operator=False)
    assert (caught.value.status, caught.value.param) == (400, name)


def test_blanks_around_a_header_are_none_of_it() -> None:
    assert read(x_session_id=" s ", x_max_wait_ms="250\t", x_priority_class="bulk ").max_wait_ms == 250


def test_the_caller_of_a_request_is_anonymous_until_it_is_set() -> None:
    scope: dict[str, Any] = {}
    assert caller_of(scope) == Caller()
    set_caller(scope, Caller("a"))
    assert caller_of(scope).owner == "a"


def test_an_empty_key_is_no_operators() -> None:
    with pytest.raises(ValidationError, match="empty entry"):
        GatewayConfig(operator_key=("",))
