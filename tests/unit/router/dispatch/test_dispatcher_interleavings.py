"""The dispatcher under any interleaving: one end for each sequence, and every count back to zero."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from catenary.v1 import common_pb2, engine_pb2
from services.router.dispatch import AbortCause, LossReason
from tests.support.dispatcher import ABORT_TIMEOUT_S, MAX_WAIT_S, World

events = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("attach", "leave", "report", "sweep", "tick", "wait"),
                *("submit", "submit", "resume", "abort", "abandon"),
                *("step", "finish", "refuse", "refuse hard", "aborted", "unknown"),
            ]
        ),
        st.integers(0, 11),
    ),
    max_size=80,
)


def play(world: World, what: str, number: int) -> None:
    link = world.links[number % len(world.links)] if world.links else None
    sequence = world.sequences.get(number)
    match what:
        case "attach":
            world.attach("abc"[number % 3])
        case "submit" if number not in world.sequences:
            world.submit(number, tokens=number + 1)
        case "resume" if number not in world.sequences:
            world.submit(number, resumed=True)
        case "tick":
            world.tick()
        case "wait":
            world.now += MAX_WAIT_S * 0.4
            world.dispatcher.lifecycle.tick()
        case "abort" if sequence is not None:
            world.dispatcher.abort(sequence, AbortCause.CLIENT, answer=True)
        case "abandon" if sequence is not None:
            world.dispatcher.abandon(sequence, AbortCause.DISCONNECT)
            world.gone.add(number)
        case "sweep":
            world.now += ABORT_TIMEOUT_S * 0.6
            world.dispatcher.sweep()
        case "leave" if link is not None:
            world.membership.leave(link, LossReason.STREAM_ENDED)
        case "report" if link is not None:
            load = engine_pb2.LoadReport(sequence=number, state=engine_pb2.ENGINE_STATE_SERVING)
            world.send(link, load=load)
        case "step" | "finish" if link is not None:
            world.step(link, [*link.sequences, 10_000], ends=what == "finish")
        case _ if link is not None and link.sequences:
            handle = list(link.sequences)[number % len(link.sequences)]
            answer(world, link, what, handle)


def answer(world: World, link, what: str, handle: int) -> None:
    if what.startswith("refuse"):
        error = common_pb2.Error(code=common_pb2.ERROR_CODE_OVERLOADED, retryable=what == "refuse")
        world.send(link, refusal=common_pb2.Refusal(handle=handle, error=error))
    elif what in ("aborted", "unknown"):
        outcome = common_pb2.ABORT_OUTCOME_ABORTED if what == "aborted" else common_pb2.ABORT_OUTCOME_UNKNOWN
        world.send(link, abort_result=engine_pb2.AbortResult(handle=handle, outcome=outcome))


@given(events)
@settings(max_examples=300, deadline=None)
def test_any_interleaving_ends_each_sequence_once_and_counts_to_zero(script):
    world = World()
    world.attach("a")
    for what, number in script:
        play(world, what, number)
        world.links = [link for link in world.links if not link.closed]
        world.check_counts()
    for link in world.links:
        world.membership.leave(link, LossReason.STREAM_ENDED)
    world.now += MAX_WAIT_S
    world.dispatcher.lifecycle.tick()
    world.check_idle()
