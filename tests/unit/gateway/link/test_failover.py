"""Several routers as one session: the choice of a router, and the models of all of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc

from catenary.v1 import common_pb2, router_pb2
from gateway.link.failover import least_busy, rendezvous
from gateway.link.router_session import RouterSession
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


class Written(list[tuple[str, int]]):
    """A stream that takes everything: kind and handle of what was written."""

    async def write(self, message: router_pb2.SessionRequest) -> None:
        """Take it."""
        kind = message.WhichOneof("payload") or ""
        self.append((kind, getattr(message, kind).handle))


async def test_what_is_given_up_before_it_was_sent_is_not_sent() -> None:
    async with grpc.aio.insecure_channel("unix:/nowhere") as channel:
        nobody: Any = None
        reader: Any = object()
        session = RouterSession(
            "unix:/nowhere", channel, instance_id="g", listener=nobody, connect_timeout_s=1, silence_s=1
        )
        session.connected = True
        handles = [session.submit(common_pb2.Submit(), reader) for _ in range(4)]
        session.abort(handles[2])
        session.abort(handles[2])
        assert (session.unsent, session.live) == (3, 3)
        call: Any = Written()
        writer = asyncio.create_task(session._write(call))
        await eventually(lambda: len(call) == 3, "the submits")
        assert session.unsent == 0
        session.abort(handles[0])
        await eventually(lambda: len(call) == 4, "the abort")
        writer.cancel()
    assert call == [*(("submit", handles[index]) for index in (0, 1, 3)), ("abort", handles[0])]
