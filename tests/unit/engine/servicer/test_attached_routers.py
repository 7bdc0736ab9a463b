"""For whom an engine is kept: routers take turns, and everybody else gives it nothing new."""

from __future__ import annotations

import asyncio

from services.engine.servicer.routers import LOAD_DUE, AttachedRouters, RouterOutbox


def attached(count: int, **limits: float) -> tuple[AttachedRouters, list[RouterOutbox]]:
    routers, ports = AttachedRouters(**limits), [RouterOutbox(link, max_answers=8) for link in range(count)]
    for port in ports:
        routers.join(port, f"router-{port.link}")
    return routers, ports


def reserved_from(routers: AttachedRouters) -> list[bool]:
    return [routers.reserved_from(link) for link in range(3)]


def reports(ports: list[RouterOutbox]) -> list[bool]:
    return [LOAD_DUE in port.take() for port in ports]


def test_routers_take_turns_in_the_order_in_which_they_asked() -> None:
    routers, ports = attached(3)
    assert reserved_from(routers) == [False] * 3
    routers.reserve(ports[1], wanted=True)
    assert reserved_from(routers) == [True, False, True]
    assert reports(ports) == [True] * 3
    routers.reserve(ports[0], wanted=True)
    routers.reserve(ports[1], wanted=True)
    assert reserved_from(routers) == [True, False, True]
    assert reports(ports) == [False] * 3
    routers.reserve(ports[1], wanted=False)
    assert reserved_from(routers) == [False, True, True]
    assert reports(ports) == [True] * 3
    routers.reserve(ports[0], wanted=False)
    assert reserved_from(routers) == [False] * 3


def test_who_leaves_has_no_turn() -> None:
    routers, ports = attached(3)
    for port in ports:
        routers.reserve(port, wanted=True)
    assert routers.leave(ports[0])
    assert reserved_from(routers) == [True, False, True]
    # A late word of one that is gone counts for nothing.
    routers.reserve(ports[0], wanted=True)
    assert routers.leave(ports[1])
    assert routers.leave(ports[2])
    assert not routers.leave(ports[2])
    assert reserved_from(routers) == [False] * 3


def test_a_turn_that_lasts_too_long_is_passed_on() -> None:
    routers, ports = attached(3, kept_limit_s=10)
    routers.end_long_turn(0)
    for port in ports[:2]:
        routers.reserve(port, wanted=True)
    for now in (100, 109):
        routers.end_long_turn(now)
        assert reserved_from(routers) == [False, True, True]
    reports(ports)
    routers.end_long_turn(110)
    assert reserved_from(routers) == [True, False, True]
    assert reports(ports) == [True] * 3
    # A turn of its own begins for the next one, and the first one comes after it.
    routers.end_long_turn(119)
    routers.end_long_turn(120)
    assert reserved_from(routers) == [True, False, True]
    routers.end_long_turn(129)
    assert reserved_from(routers) == [False, True, True]
    routers.reserve(ports[1], wanted=False)
    # Nobody waits for a turn, but others are there: all may use the engine until it is asked for anew.
    for now in (130, 140):
        routers.end_long_turn(now)
    assert reserved_from(routers) == [False] * 3
    routers.reserve(ports[0], wanted=True)
    assert reserved_from(routers) == [False, True, True]


def test_each_turn_has_its_own_time() -> None:
    routers, ports = attached(2, kept_limit_s=10)
    for now in range(0, 100, 9):
        routers.reserve(ports[0], wanted=True)
        routers.end_long_turn(now)
        assert reserved_from(routers)[:2] == [False, True]
        routers.reserve(ports[0], wanted=False)


def test_a_router_that_is_alone_keeps_the_engine_as_long_as_it_likes() -> None:
    routers, ports = attached(1, kept_limit_s=10)
    routers.reserve(ports[0], wanted=True)
    for now in (0, 10, 20):
        routers.end_long_turn(now)
    assert routers.reserved_from(1)


async def test_an_engine_that_drains_waits_until_every_router_knows() -> None:
    routers, ports = attached(3)
    waiting = asyncio.create_task(routers.all_know_of_drain())
    await asyncio.sleep(0)
    routers.knows_of_drain(ports[0])
    routers.leave(ports[1])
    await asyncio.sleep(0)
    assert not waiting.done()
    routers.knows_of_drain(ports[2])
    await asyncio.wait_for(waiting, 5)
    # Without routers there is nobody to wait for.
    nobody, _ = attached(0)
    await asyncio.wait_for(nobody.all_know_of_drain(), 5)
