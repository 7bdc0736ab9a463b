"""Steps to feeds, feeds to readers, and the board of models."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from catenary.columns import MalformedStep
from catenary.v1 import common_pb2
from gateway.errors import ApiError, internal
from gateway.link.inbox import TAKE_TOKENS, Inbox, SequenceEnded, SequenceFeed, deliver, ended


def feeds(inbox: Inbox, *handles: int) -> dict[int, SequenceFeed]:
    return {handle: inbox.feed(index) for index, handle in enumerate(handles)}


def step(**columns: Any) -> common_pb2.StepOutput:
    return common_pb2.StepOutput(**columns)


def end(row: int, reason: Any = common_pb2.FINISH_REASON_LENGTH, **fields: Any) -> common_pb2.SequenceEnd:
    return common_pb2.SequenceEnd(row=row, reason=reason, **fields)


async def test_columns_reach_their_feeds() -> None:
    inbox = Inbox(1000)
    table = feeds(inbox, 10, 20)
    columns = common_pb2.LogprobColumns(
        rows=[1], sampled=[-1.0, -2.0], top_counts=[1, 2], top_ids=[4, 5, 6], top_logprobs=[-1.0, -2.0, -3.0]
    )
    output = step(handles=[10, 99, 20], token_counts=[1, 1, 2], token_ids=[1, 2, 3, 4], ends=[end(2)])
    columns.rows[:] = [2]
    output.logprobs.CopyFrom(columns)
    assert list(deliver(output, table.get)) == [(20, output.ends[0])]
    first, second = await inbox.wait()
    assert (first.take().ids, first.take().ids) == ([1], [])
    batch = second.take()
    assert (batch.ids, [entry.top_ids for entry in batch.logprobs or []]) == ([3, 4], [(4,), (5, 6)])
    assert batch.end is None


async def test_steps_merge_for_a_slow_reader_up_to_its_bound() -> None:
    inbox = Inbox(3)
    table = feeds(inbox, 1)
    for token in range(3):
        assert list(deliver(step(handles=[1], token_counts=[1], token_ids=[token]), table.get)) == []
    assert list(deliver(step(handles=[1], token_counts=[1], token_ids=[9]), table.get)) == [(1, None)]
    (feed,) = await inbox.wait()
    assert feed.take().ids == [0, 1, 2]


@pytest.mark.parametrize(
    "columns",
    [
        {"handles": [1], "token_counts": [2], "token_ids": [1]},
        {"handles": [1, 2], "token_counts": [1], "token_ids": [1]},
        {"handles": [1], "token_counts": [1], "token_ids": [1, 2]},
    ],
)
def test_columns_that_do_not_fit_are_refused_whole(columns: dict[str, Any]) -> None:
    table = feeds(Inbox(10), 1)
    with pytest.raises(MalformedStep):
        list(deliver(step(**columns), table.get))
    assert table[1].take().ids == []


def test_log_probabilities_that_do_not_fit_are_refused() -> None:
    output = step(handles=[1], token_counts=[1], token_ids=[1])
    output.logprobs.CopyFrom(common_pb2.LogprobColumns(rows=[0]))
    with pytest.raises(MalformedStep):
        list(deliver(output, feeds(Inbox(10), 1).get))
    output.logprobs.CopyFrom(common_pb2.LogprobColumns(rows=[5], sampled=[-1], top_counts=[0]))
    with pytest.raises(MalformedStep):
        list(deliver(output, feeds(Inbox(10), 1).get))


def test_ends() -> None:
    stop = ended(end(0, common_pb2.FINISH_REASON_STOP, stop_token_id=2))
    assert (stop.stop_token, stop.error) == (2, None)
    aborted = ended(end(0, common_pb2.FINISH_REASON_ABORT)).error
    assert aborted is not None
    assert aborted.status == 503
    lost = common_pb2.Error(code=common_pb2.ERROR_CODE_ENGINE_LOST, message="Lost.", retryable=True)
    error = ended(end(0, common_pb2.FINISH_REASON_ERROR, error=lost)).error
    assert error is not None
    assert (error.status, error.message) == (503, "Lost.")
    unnamed = ended(end(0, common_pb2.FINISH_REASON_ERROR)).error
    assert unnamed is not None
    assert unnamed.status == 500


async def test_a_long_backlog_is_taken_in_parts() -> None:
    inbox = Inbox(10_000)
    feed = inbox.feed(0)
    assert feed.extend(list(range(TAKE_TOKENS + 5)), [])
    feed.finish(SequenceEnded(common_pb2.FINISH_REASON_LENGTH))
    (ready,) = await inbox.wait()
    assert (len(ready.take().ids), ready is feed) == (TAKE_TOKENS, True)
    (ready,) = await inbox.wait()
    batch = ready.take()
    assert (batch.ids, batch.end is not None) == (list(range(TAKE_TOKENS, TAKE_TOKENS + 5)), True)


async def test_an_interrupt_wakes_and_stays() -> None:
    inbox = Inbox(10)
    waiting = asyncio.create_task(inbox.wait())
    await asyncio.sleep(0)
    inbox.interrupt(internal())
    for _ in range(2):
        with pytest.raises(ApiError):
            await waiting
        waiting = asyncio.create_task(inbox.wait())
    waiting.cancel()
