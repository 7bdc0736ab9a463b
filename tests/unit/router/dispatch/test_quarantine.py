"""What engines are told when they are kept for a sequence, and in which order with it."""

from __future__ import annotations

import pytest

from catenary.v1 import common_pb2, engine_pb2
from services.router.dispatch import AbortCause, EngineLink
from tests.support.dispatcher import World, hello


def sent(link: EngineLink) -> list[int | bool]:
    """Handles of the submits and words of keeping that wait, in the order in which they are written."""
    found: list[int | bool] = []
    while (message := link.pop()) is not None:
        match message.WhichOneof("payload"):
            case "submit":
                found.append(message.submit.handle)
            case "keep":
                found.append(message.keep.wanted)
    return found


@pytest.mark.parametrize(
    ("words", "order"),
    [
        ([7, True], [True, 7]),
        ([7, False], [7, False]),
        ([False, 7], [7, False]),
        ([True, 7, False], [True, 7, False]),
        ([7, False, True], [7, False, True]),
        ([False, True], [False, True]),
        ([False, True, False], [False]),
        ([True, True], [True]),
        ([False, False], [False]),
        # What the engine is wanted for comes while it is kept.
        ([7, False, True, 8], [True, 7, 8]),
        ([7, False, True, 8, False], [True, 7, 8, False]),
        ([True, 7, False, True], [True, 7, False, True]),
    ],
)
def test_an_engine_is_reserved_before_the_submits_and_released_after_them(words, order):
    link = EngineLink(engine=None)  # type: ignore[arg-type]
    for word in words:
        if isinstance(word, bool):
            link.keep(wanted=word)
        else:
            link.submit(engine_pb2.AttachResponse(submit=common_pb2.Submit(handle=word)))
    assert sent(link) == order
    assert sent(link) == []


def report(world: World, link: EngineLink, number: int, used_blocks: int) -> None:
    load = engine_pb2.LoadReport(
        sequence=number,
        state=engine_pb2.ENGINE_STATE_SERVING,
        running=1,
        used_blocks=used_blocks,
        total_blocks=64,
    )
    world.send(link, load=load)
    world.tick()


def test_a_turn_ends_after_its_sequence_and_before_the_next_one_has_its_own():
    world = World()
    link = world.membership.attach(hello("a", publishes_kv=True))
    report(world, link, 1, used_blocks=63)
    for handle in (1, 2):
        assert world.submit(handle, tokens=40) is None
    world.tick()
    assert sent(link) == [True]
    # Enough for one of them.
    report(world, link, 2, used_blocks=60)
    (placed,) = link.sequences
    assert sent(link) == [placed, False, True]
    world.dispatcher.abort(world.sequences[2], AbortCause.CLIENT)
    assert sent(link) == [False]
    assert not link.engine.reserved_for


def test_an_engine_is_reserved_for_a_quarantined_sequence_to_its_first_token():
    world = World()
    link = world.attach()
    world.submit(0)
    (busy,) = link.sequences
    for handle in (1, 2):
        world.submit(handle, quarantined=True)
    world.tick()
    assert sent(link) == [True, busy]
    world.step(link, [busy], ends=True)
    world.tick()
    # Not given back: it is not another router's turn before the sequence is there.
    (first,) = link.sequences
    assert sent(link) == [first]
    world.step(link, [first])
    world.tick()
    assert sent(link) == [False, True]
    world.step(link, [first], ends=True)
    world.tick()
    (second,) = link.sequences
    assert sent(link) == [second]
    world.step(link, [second], ends=True)
    assert sent(link) == [False]


def test_a_quarantined_sequence_that_is_placed_at_once_comes_after_its_reservation():
    world = World()
    link = world.attach()
    world.submit(1, quarantined=True)
    (handle,) = link.sequences
    assert sent(link) == [True, handle]
