"""For whom an engine is kept: routers take turns, and everybody else gives it nothing new."""

from __future__ import annotations

from services.engine.servicer.attached import AttachedRouters
from services.engine.servicer.mailbox import Mailbox


def attached(count: int) -> tuple[AttachedRouters, list[Mailbox]]:
    routers, ports = AttachedRouters(), [Mailbox(link, max_answers=8) for link in range(count)]
    for port in ports:
        routers.join(port)
    return routers, ports


def kept_from(routers: AttachedRouters) -> list[bool]:
    return [routers.kept_from(link) for link in range(3)]


def reports(ports: list[Mailbox]) -> list[bool]:
    return [port.take()[1] for port in ports]


def test_routers_take_turns_in_the_order_in_which_they_asked() -> None:
    routers, ports = attached(3)
    assert kept_from(routers) == [False] * 3
    routers.keep(ports[1], wanted=True)
    assert kept_from(routers) == [True, False, True]
    assert reports(ports) == [True] * 3
    routers.keep(ports[0], wanted=True)
    routers.keep(ports[1], wanted=True)
    assert kept_from(routers) == [True, False, True]
    assert reports(ports) == [False] * 3
    routers.keep(ports[1], wanted=False)
    assert kept_from(routers) == [False, True, True]
    assert reports(ports) == [True] * 3
    routers.keep(ports[0], wanted=False)
    assert kept_from(routers) == [False] * 3


def test_who_leaves_has_no_turn() -> None:
    routers, ports = attached(3)
    for port in ports:
        routers.keep(port, wanted=True)
    assert routers.leave(ports[0])
    assert kept_from(routers) == [True, False, True]
    # A late word of one that is gone counts for nothing.
    routers.keep(ports[0], wanted=True)
    assert routers.leave(ports[1])
    assert routers.leave(ports[2])
    assert not routers.leave(ports[2])
    assert kept_from(routers) == [False] * 3
