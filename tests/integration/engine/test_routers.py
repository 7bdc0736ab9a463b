"""An engine and several routers: names that change what they stand for, one router behind two addresses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from catenary.rpc import AddressFamilies
from catenary_testing.engine import Script
from services.engine.servicer import RouterLinks
from tests.support.engines import ScriptedEngine
from tests.support.fleet import Fleet
from tests.support.specs import expected_tokens, sequence_spec
from tests.support.waiting import eventually

SLOW = Script(step_delay_ms=5)


@pytest.fixture
def fast_look_up(monkeypatch):
    monkeypatch.setattr("catenary.rpc.resolving._LOOK_UP_S", 0.02)
    monkeypatch.setattr("catenary.rpc.resolving._LOOK_UP_ALONE_S", 0.02)


class Names:
    """A name service that the test keeps; None: it is away."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Sequence[str] | None = addresses
        self.look_ups = 0

    async def __call__(self, name: str) -> Sequence[str]:
        assert name == "routers.example:7070"
        self.look_ups += 1
        if self.addresses is None:
            raise OSError("away")
        return self.addresses


async def named_engine(monkeypatch, secrets, names: Names, **options) -> ScriptedEngine:
    def with_names(addresses, make, hub):
        return RouterLinks(addresses, make, hub, look_up=names)

    monkeypatch.setattr("services.engine.app.RouterLinks", with_names)
    engine = ScriptedEngine(["routers.example:7070"], secrets, listen=("127.0.0.1:0",), **options)
    await engine.start()
    return engine


async def test_an_engine_follows_what_its_routers_name_stands_for(
    start_fleet, secrets, monkeypatch, fast_look_up
):
    tcp = {"listen": ("127.0.0.1:0",)}
    first = await start_fleet(engines=0, router=tcp)
    second = await start_fleet(engines=0, router=tcp)
    names = Names()
    engine = await named_engine(monkeypatch, secrets, names, script=SLOW)
    try:
        await eventually(lambda: names.look_ups >= 3, "three look-ups")
        assert len(engine.app.frontend.routers) == 0
        names.addresses = [first.router_address]
        await first.serving(1)
        names.addresses = [first.router_address, second.router_address]
        await second.serving(1)
        answers = await asyncio.gather(
            *(fleet.answer(sequence_spec([7, 8], max_tokens=20)) for fleet in (first, second))
        )
        assert [tokens for tokens, _ in answers] == [expected_tokens([7, 8], 20)] * 2
        # Attached ones stay, whatever the name service says or does not say.
        running = asyncio.create_task(first.answer(sequence_spec([9], max_tokens=60)))
        await eventually(lambda: engine.app.frontend.live_sequences == 1, "a sequence that runs")
        names.addresses = None
        seen = names.look_ups
        await eventually(lambda: names.look_ups >= seen + 3, "three look-ups that fail")
        names.addresses = [second.router_address]
        tokens, _ = await running
        assert tokens == expected_tokens([9], 60)
        # Once the router itself is gone, its address is.
        await first.router.stop()
        await eventually(lambda: len(engine.app.frontend.routers) == 1, "one router left")
        await eventually(lambda: len(engine.app.links) == 1, "the old address to be dropped")
        await second.serving(1)
    finally:
        await engine.stop()


def _reports(fleet: Fleet) -> int:
    return max((one.report.sequence for one in fleet.router.fleet if one.report is not None), default=0)


async def test_one_router_behind_two_addresses_is_attached_to_once(start_fleet, secrets):
    fleet = await start_fleet(engines=0)
    proxy = await fleet.add_proxy()
    engine = ScriptedEngine(
        [fleet.router_address, proxy.address], secrets, listen=("127.0.0.1:0",), script=SLOW
    )
    await engine.start()
    try:
        await fleet.serving(1)
        # Five reports: by then the second address has led to the same router.
        await eventually(lambda: _reports(fleet) >= 5, "five reports")
        (attached,) = fleet.router.fleet
        tokens, _ = await fleet.answer(sequence_spec([5], max_tokens=80))
        assert tokens == expected_tokens([5], 80)
        (still,) = fleet.router.fleet
        assert still.epoch == attached.epoch <= 2
    finally:
        await engine.stop()


def test_of_two_ip_versions_one_is_taken_and_the_other_if_that_one_leads_nowhere():
    now = 0.0
    families = AddressFamilies(patience_s=10, clock=lambda: now)
    sixth, fourth = ["[2001:db8::1]:7070"], ["10.0.0.1:7070", "10.0.0.2:7070"]
    assert families.choose("a", [], ()) == []
    assert families.choose("a", sixth, ()) == sixth
    assert families.choose("b", sixth + fourth, ()) == fourth
    now = 9.0
    assert families.choose("b", sixth + fourth, fourth[1:]) == fourth
    now = 18.0
    assert families.choose("b", sixth + fourth, ()) == fourth
    now = 19.0
    assert families.choose("b", sixth + fourth, ()) == sixth
    now = 40.0
    assert families.choose("b", sixth + fourth, sixth) == sixth
    now = 50.0
    assert families.choose("b", sixth + fourth, ()) == fourth


async def test_a_router_that_its_name_leads_to_by_version_6_alone_is_found(
    start_fleet, secrets, monkeypatch, fast_look_up
):
    # As `localhost` where 127.0.0.1 leads to nobody.
    monkeypatch.setattr(
        AddressFamilies.__init__, "__kwdefaults__", {"patience_s": 0.1, "clock": time.monotonic}
    )
    fleet = await start_fleet(engines=0, router={"listen": ("[::1]:0",)})
    port = fleet.router_address.rpartition(":")[2]
    engine = await named_engine(monkeypatch, secrets, Names(f"127.0.0.1:{port}", f"[::1]:{port}"))
    try:
        await fleet.serving(1)
    finally:
        await engine.stop()
