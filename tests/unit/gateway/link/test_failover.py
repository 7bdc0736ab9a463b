"""Several routers as one: who gets what, which models there are, which addresses are dialled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from catenary.rpc import NamedAddresses, is_name, resolve
from catenary.v1 import common_pb2, router_pb2
from gateway.link.failover import least_busy, merged, rendezvous
from gateway.link.router_session import RouterSession
from gateway.targets import Targets
from tests.support.virtual_time import virtual_time
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


def served(engines: int, length: int = 100, created: int = 5, name: str = "m") -> router_pb2.ServedModel:
    info = common_pb2.ModelInfo(name=name, max_model_len=length, vocab_size=10)
    load = router_pb2.ModelLoad(running=engines, total_blocks=engines)
    return router_pb2.ServedModel(info=info, serving_engines=engines, created=created, load=load)


def test_models_of_several_routers() -> None:
    first, second = served(3, 100, 9), served(2, 50, 5)
    (one,) = merged([{"m": first}, {"m": second}, {}])
    assert (one.serving_engines, one.load.running, one.info.max_model_len, one.created) == (3, 3, 50, 5)
    assert (first.info.max_model_len, second.created) == (100, 5)
    # A context that no engine has does not count.
    (one,) = merged([{"m": served(1, 100)}, {"m": served(0, 10)}])
    assert one.info.max_model_len == 100
    (one,) = merged([{"m": served(0, 100)}, {"m": served(0, 10)}])
    assert (one.serving_engines, one.info.max_model_len) == (0, 10)


def test_an_awaited_model_is_listed_without_engines() -> None:
    gone = served(2)
    (one,) = merged([{}], [gone])
    assert (one.info.name, one.serving_engines, one.load.running) == ("m", 0, 0)
    assert gone.serving_engines == 2
    (one,) = merged([{"m": served(1)}], [gone])
    assert one.serving_engines == 1


class Session:
    """Runs until it is cancelled, and notes that it was closed."""

    def __init__(self, address: str, name: str) -> None:
        self.address = address
        self.name = name
        self.connected = False
        self.live = 0
        self.running = False
        self.closed = False

    async def run(self) -> None:
        self.running = True
        try:
            await asyncio.Event().wait()
        finally:
            self.running = False

    async def close(self) -> None:
        assert not self.running
        self.closed = True


@virtual_time
async def test_a_name_is_looked_up_for_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("catenary.rpc.resolving._LOOK_UP_S", 0.01)
    monkeypatch.setattr("catenary.rpc.resolving._LOOK_UP_ALONE_S", 0.01)
    answers: list[Any] = [["10.0.0.1:1", "10.0.0.2:1", "[fd00::1]:1"]]
    made: dict[str, Session] = {}

    async def look_up(name: str) -> Sequence[str]:
        assert name == "router:1"
        if isinstance(answers[-1], OSError):
            raise answers[-1]
        return list(answers[-1])

    def make(address: str, name: str) -> Session:
        return made.setdefault(address, Session(address, name))

    targets = Targets(["router:1", "unix:/r.sock"], make, lambda session: session.connected, look_up)

    def dialled() -> set[str]:
        return {session.address for session in targets.all}

    running = asyncio.create_task(targets.run())
    await eventually(lambda: dialled() == {"unix:/r.sock", "10.0.0.1:1", "10.0.0.2:1"}, "three sessions")
    assert made["10.0.0.1:1"].name == "router:1"
    kept = made["10.0.0.2:1"]
    kept.connected = True
    busy = made["10.0.0.1:1"]
    busy.live = 1
    answers.append(["10.0.0.3:1"])
    await eventually(lambda: dialled() == {"unix:/r.sock", "10.0.0.2:1", "10.0.0.3:1"}, "another one")
    await eventually(lambda: not busy.running, "the end of its run")
    await asyncio.sleep(0.05)
    assert not busy.closed
    busy.live = 0
    await eventually(lambda: busy.closed, "the end of its channel")
    answers.append(OSError("no name service"))
    kept.connected = False
    await asyncio.sleep(0.05)
    assert len(dialled()) == 3
    answers.append(["10.0.0.3:1"])
    await eventually(lambda: len(dialled()) == 2, "the old one to be dropped")
    running.cancel()
    await asyncio.wait({running})
    await targets.close()
    assert all(session.closed for session in made.values())


async def test_what_is_a_name() -> None:
    assert [is_name(text) for text in ("router:1", "10.0.0.1:1", "[::1]:1", "unix:/x")] == [
        True,
        False,
        False,
        False,
    ]
    assert await resolve("[::1]:1") == ("[::1]:1",)
    assert "127.0.0.1:7" in await resolve("localhost:7")
    with pytest.raises(ValueError):
        is_name("nothing")


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
async def test_what_cannot_be_a_host_is_a_name_that_is_not_found(host: str) -> None:
    with pytest.raises(OSError, match="Not a host name"):
        await resolve(f"{host}:7071")
    known = {"10.0.0.1:7071": True}
    assert set(await NamedAddresses([f"{host}:7071"]).wanted(known)) == set(known)


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
