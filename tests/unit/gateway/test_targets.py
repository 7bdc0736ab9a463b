"""Targets by their addresses: names are looked up for life, and lost targets dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from catenary.rpc import NamedAddresses, is_name, resolve
from gateway.targets import Targets
from tests.support.virtual_time import virtual_time
from tests.support.waiting import eventually


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
