"""Several routers as one session: the choice of a router, and the models of all of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from catenary.v1 import common_pb2, router_pb2
from gateway.link.failover import least_busy, rendezvous
from tests.support.session_streams import GreetedStream, Listening, session_on
from tests.support.waiting import eventually


@dataclass
class Place:
    """A router as far as the spread looks at it."""

    address: str
    live: int = 0


def test_a_tenant_moves_only_if_its_router_leaves() -> None:
    places = [Place(f"router-{number}:7070") for number in range(4)]
    homes = {f"tenant-{number}": rendezvous(f"tenant-{number}", places) for number in range(400)}
    counts = [list(homes.values()).count(place) for place in places]
    assert min(counts) > 60
    left = places[1:]
    for tenant, place in homes.items():
        assert rendezvous(tenant, left) is place or place is places[0]
        assert rendezvous(tenant, [*reversed(places)]) is place


def test_nobodys_requests_go_where_the_fewest_are_and_take_turns() -> None:
    places = [Place("a", 2), Place("b", 1), Place("c", 1)]
    assert {least_busy(places, turn).address for turn in range(6)} == {"b", "c"}
    even = [Place(name) for name in "abc"]
    assert [least_busy(even, turn).address for turn in range(4)] == ["a", "b", "c", "a"]


async def test_what_is_given_up_before_it_was_sent_is_not_sent() -> None:
    reader: Any = object()
    stream = GreetedStream()
    session = session_on(stream, Listening())
    session.connected = True
    handles = [session.submit(common_pb2.Submit(), reader) for _ in range(4)]
    session.abort(handles[2])
    session.abort(handles[2])
    assert (session.unsent, session.live) == (3, 3)
    running = asyncio.create_task(session.run())
    await eventually(lambda: len(stream.written) == 4, "the submits")
    assert session.unsent == 0
    session.abort(handles[0])
    await eventually(lambda: len(stream.written) == 5, "the abort")
    running.cancel()
    _, *written = [(kind_of(message), handle_of(message)) for message in stream.written]
    assert written == [*(("submit", handles[index]) for index in (0, 1, 3)), ("abort", handles[0])]


def kind_of(message: router_pb2.SessionRequest) -> str:
    return message.WhichOneof("payload") or ""


def handle_of(message: router_pb2.SessionRequest) -> int:
    return int(getattr(getattr(message, kind_of(message)), "handle", 0))
