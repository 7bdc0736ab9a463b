"""Outboxes, sessions' updates and the watch over readers."""

from __future__ import annotations

import asyncio
import random

import pytest
from prometheus_client import CollectorRegistry

from catenary.columns import MAX_STEP_WEIGHT, StepRow
from catenary.resume import PoisonedRequests
from catenary.v1 import common_pb2, engine_pb2, router_pb2
from services.router.admission import Admission, AdmissionLimits, QueueOptions, Refused, SpecLimits
from services.router.dispatch import (
    AbortCause,
    Dispatcher,
    EngineHealth,
    EngineLink,
    PoisonBook,
    SessionOutbox,
    Sessions,
)
from services.router.fleet import Fleet
from services.router.metrics import RouterMetrics
from services.router.placement import LeastLoaded, Placer
from services.router.service import ReaderWatch


def row(handle: int, *tokens: int) -> StepRow:
    return StepRow(handle, list(tokens), None, None)


async def test_all_rows_of_a_tick_are_one_message():
    outbox = SessionOutbox(max_unread=10)
    messages = outbox.messages()
    for handle in (1, 2, 1):
        outbox.steps.row(handle).append(row(handle, 5, 6))
    step = (await anext(messages)).step
    assert list(step.handles) == [1, 2]
    assert list(step.token_counts) == [4, 2]
    outbox.close()
    assert [message async for message in messages] == []


async def test_only_the_newest_models_wait_and_answers_come_first():
    outbox = SessionOutbox(max_unread=10)
    for created in (1, 2):
        outbox.models(router_pb2.ModelsUpdate(models=[router_pb2.ServedModel(created=created)]))
    outbox.answer(router_pb2.SessionResponse(refusal=common_pb2.Refusal(handle=9)))
    messages = outbox.messages()
    assert (await anext(messages)).refusal.handle == 9
    assert (await anext(messages)).models.models[0].created == 2


async def test_a_message_that_was_merged_for_long_is_cut_between_rows():
    outbox = SessionOutbox(max_unread=10)
    for handle in (1, 2, 3):
        outbox.steps.row(handle).append(row(handle, *[7] * (MAX_STEP_WEIGHT // 2 + 1)))
    messages = outbox.messages()
    assert [list((await anext(messages)).step.handles) for _ in range(3)] == [[1], [2], [3]]


async def test_first_rows_go_before_what_others_go_on_with() -> None:
    outbox = SessionOutbox(max_unread=10)
    outbox.steps.row(1).append(row(1, 10))
    outbox.steps.row(2, first=True).append(row(2, 20))
    outbox.steps.row(3).append(row(3, 30))
    # It still waits: what follows is its first message, too.
    outbox.steps.row(2).append(row(2, 21))
    assert outbox.unread == 3
    outbox.close(flush=True)
    steps = [message.step async for message in outbox.messages()]
    assert [list(step.handles) for step in steps] == [[2], [1, 3]]
    assert list(steps[0].token_ids) == [20, 21]


async def test_no_room_until_what_waits_is_read():
    outbox = SessionOutbox(max_unread=3)
    for handle in range(3):
        outbox.answer(router_pb2.SessionResponse(refusal=common_pb2.Refusal(handle=handle)))
    waiting = asyncio.create_task(outbox.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    messages = outbox.messages()
    await anext(messages)
    await asyncio.wait_for(waiting, 1)
    outbox.answer(router_pb2.SessionResponse(refusal=common_pb2.Refusal(handle=3)))
    waiting = asyncio.create_task(outbox.room())
    await asyncio.sleep(0)
    outbox.close()
    await asyncio.wait_for(waiting, 1)


async def test_what_waits_at_the_close_is_dropped_or_flushed():
    for flush, left in ((False, 0), (True, 2)):
        outbox = SessionOutbox(max_unread=10)
        outbox.steps.row(1).append(row(1, 5))
        outbox.answer(router_pb2.SessionResponse(refusal=common_pb2.Refusal(handle=9)))
        outbox.close(flush=flush)
        assert len([message async for message in outbox.messages()]) == left


async def test_an_engines_outbox_merges_renewals_and_takes_unsent_submits_back():
    link = EngineLink(engine=None)  # type: ignore[arg-type]
    for handle in (1, 2):
        link.submit(engine_pb2.AttachResponse(submit=common_pb2.Submit(handle=handle)))
    link.renew(1)
    link.renew(2)
    messages = link.messages()
    assert (await anext(messages)).renewed.sequence == 2
    assert (await anext(messages)).submit.handle == 1
    assert link.abort(2)
    assert not link.abort(1)
    assert (await anext(messages)).abort.handle == 1
    link.end()
    assert [message async for message in messages] == []


def sessions_of(fleet: Fleet, **limits) -> Sessions:
    metrics = RouterMetrics(CollectorRegistry())
    dispatcher = Dispatcher(
        Admission(AdmissionLimits(10, 100, 1)),
        Placer(fleet, LeastLoaded(random.Random()), retry_after_ms=1),
        metrics,
        EngineHealth(metrics, on_change=lambda: None),
        spec_limits=SpecLimits(10),
        queue_options=QueueOptions(),
        poison=PoisonBook(PoisonedRequests(limit=8, ttl_s=60), lambda: None),
        abort_timeout_s=1,
    )
    return Sessions(fleet, dispatcher, max_sessions=limits.get("max_sessions", 2), max_unread=10)


async def test_sessions_are_limited_and_closing_twice_is_harmless():
    sessions = sessions_of(Fleet(lease_s=1))
    first, second = sessions.open(), sessions.open()
    with pytest.raises(Refused) as caught:
        sessions.open()
    assert "max-sessions" in caught.value.error.message
    sessions.close(first, AbortCause.SESSION_END)
    sessions.close(first, AbortCause.SESSION_END)
    submit = common_pb2.Submit(handle=1, spec=common_pb2.SequenceSpec(model="m", token_ids=[1]))
    first.receive(router_pb2.SessionRequest(submit=submit))
    assert first.outbox.unread == 0
    sessions.close_all(AbortCause.DRAIN)
    assert len(sessions) == 0
    assert len([message async for message in second.outbox.messages()]) == 1


async def test_updates_are_pushed_on_change_and_only_on_change():
    fleet = Fleet(lease_s=1)
    sessions = sessions_of(fleet)
    messages = sessions.open().outbox.messages()
    assert not (await anext(messages)).models.models
    model = common_pb2.ModelInfo(name="m", max_model_len=5)
    capacity = engine_pb2.Capacity(max_running=9)
    fleet.attach(engine_pb2.EngineHello(instance_id="i", model=model, capacity=capacity), now=0, unix_time=0)
    for _ in range(3):
        sessions.changed()
    assert (await anext(messages)).models.models[0].info.name == "m"
    sessions.tick()
    following = asyncio.create_task(anext(messages))
    # A thousand turns of the loop, without a clock: whatever would wake it has had its turn.
    for _ in range(1000):
        await asyncio.sleep(0)
    assert not following.done()
    engine = next(iter(fleet))
    engine.apply(engine_pb2.LoadReport(sequence=1, running=4))
    sessions.tick()
    assert (await following).models.models[0].load.running == 4


async def test_a_heartbeat_is_sent_though_nothing_changed_and_even_if_the_models_fail(monkeypatch):
    fleet = Fleet(lease_s=1)
    sessions = sessions_of(fleet)
    messages = sessions.open().outbox.messages()
    await anext(messages)
    model = common_pb2.ModelInfo(name="m", max_model_len=5)
    fleet.attach(engine_pb2.EngineHello(instance_id="i", model=model), now=0, unix_time=0)
    for _ in range(2):
        sessions.beat()
        assert (await anext(messages)).models.models[0].info.name == "m"

    def fail():
        raise ValueError("no sum")

    monkeypatch.setattr(fleet, "served_models", fail)
    with pytest.raises(ValueError, match="no sum"):
        sessions.beat()
    assert (await anext(messages)).models.models[0].info.name == "m"


def test_a_stuck_write_is_called_out_once_per_limit():
    now, strikes = [0.0], []
    watch = ReaderWatch(10, clock=lambda: now[0])
    watched = watch.add(strikes.append)
    for when in (5, 9, 11, 12, 19, 21, 22):
        if when == 5:
            watched.writing()
        now[0] = float(when)
        watch.sweep()
    assert strikes == [1, 2]
    watched.written()
    now[0] = 100.0
    watch.sweep()
    watched.writing()
    now[0] = 111.0
    watch.sweep()
    assert strikes == [1, 2, 1]
    watch.remove(watched)
    now[0] = 500.0
    watch.sweep()
    assert len(watch) == 0
    assert strikes == [1, 2, 1]
