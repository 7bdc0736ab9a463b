"""Sequences in two halves under any interleaving: one end for each, and every count back to zero."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from catenary.v1 import common_pb2, engine_pb2
from services.router.dispatch import AbortCause, LossReason
from tests.support.split import BOTH, BROKEN, BUSY, DECODE, LONG, MAX_WAIT_S, PREFILL, SHORT, World, offer

events = st.lists(
    st.tuples(
        st.sampled_from(
            ["attach", "leave", "tick", "wait", "report", "stall", "finish"]
            + ["submit", "follow", "abort", "offer", "offer", "fail", "refuse", "token"] * 2
        ),
        st.integers(0, 11),
    ),
    max_size=60,
)


def play(world: World, what: str, number: int, gone: set[int]) -> None:
    links = [link for link in world.links.values() if not link.closed]
    link = links[number % len(links)] if links else None
    sequence = world.sequences.get(number)
    match what:
        case "attach":
            world.attach("pqdb"[number % 4], (PREFILL, PREFILL, DECODE, BOTH)[number % 4])
        case "submit" if number not in world.sequences:
            world.submit(number, (LONG, SHORT)[number % 4 == 3])
        case "follow" if number not in world.sequences:
            world.submit(number, leader=number - 1)
        case "tick":
            world.tick()
        case "wait":
            world.now += MAX_WAIT_S * 0.3
            world.dispatcher.lifecycle.tick()
            world.dispatcher.sweep()
        case "abort" if sequence is not None:
            world.dispatcher.abort(sequence, AbortCause.CLIENT)
        case "leave" if link is not None:
            world.membership.leave(link, LossReason.STREAM_ENDED)
        case "stall" if link is not None:
            world.dispatcher.give_up(link, BROKEN, AbortCause.STALLED)
        case "report" if link is not None:
            load = engine_pb2.LoadReport(sequence=number, state=engine_pb2.ENGINE_STATE_SERVING)
            world.send(link, load=load)
        case _ if link is not None and link.sequences:
            answer(world, link, what, list(link.sequences)[number % len(link.sequences)])


def answer(world: World, link, what: str, handle: int) -> None:
    half = link.sequences[handle].request.placed_part.name
    match what:
        case "offer":
            world.end(link, handle, kv_offer=offer(), usage=common_pb2.Usage(transferred_tokens=39))
        case "finish":
            world.end(link, handle)
        case "fail":
            world.end(link, handle, reason=common_pb2.FINISH_REASON_ERROR, error=BROKEN)
        case "refuse":
            world.send(link, refusal=common_pb2.Refusal(handle=handle, error=BUSY))
        case "token" if half != "PROMPT":
            world.send(link, step=common_pb2.StepOutput(handles=[handle], token_counts=[1], token_ids=[5]))


@given(events)
@settings(max_examples=150, deadline=None)
def test_any_interleaving_ends_each_sequence_once_and_counts_to_zero(script):
    world = World()
    world.attach("p", PREFILL)
    world.attach("d", DECODE)
    for what, number in script:
        play(world, what, number, set())
        placed = sum(engine.placed_sequences for engine in world.fleet)
        assert placed == sum(len(link.sequences) for link in world.links.values() if not link.closed)
    for link in world.links.values():
        world.membership.leave(link, LossReason.STREAM_ENDED)
    # Who waits for another may have to wait for its own turn then.
    for _ in range(3):
        world.tick()
        world.now += 2 * MAX_WAIT_S
        world.dispatcher.lifecycle.tick()
    world.check_idle()
