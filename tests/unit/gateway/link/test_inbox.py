"""Steps to feeds, feeds to readers, and the board of models."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from catenary.columns import MalformedStep
from catenary.text import Vocabulary
from catenary.v1 import common_pb2, router_pb2
from gateway.errors import ApiError, internal
from gateway.link.inbox import TAKE_TOKENS, Inbox, SequenceEnded, SequenceFeed, deliver, ended
from gateway.text.models import ModelRegistry
from tests.support.tiny_tokenizer import tokenizer_json

FILE = json.dumps(tokenizer_json()).encode()


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


def served(name: str = "m", engines: int = 1, sha: str = "") -> router_pb2.ServedModel:
    info = common_pb2.ModelInfo(name=name, max_model_len=10, vocab_size=512, tokenizer_sha256=sha)
    return router_pb2.ServedModel(info=info, serving_engines=engines)


class Shelf:
    """A tokenizer service whose file changes."""

    def __init__(self) -> None:
        self.sha = "a"
        self.fetches = 0

    async def fetch(self, model: str) -> Vocabulary:
        self.fetches += 1
        if model == "broken":
            raise ValueError("damaged")
        return Vocabulary(FILE, sha256=self.sha)


def status_of(board: ModelRegistry, name: str = "m") -> int:
    try:
        board.require(name)
    except ApiError as error:
        return error.status
    return 200


async def until(board: ModelRegistry, status: int, name: str = "m") -> None:
    async with asyncio.timeout(5):
        while status_of(board, name) != status:  # noqa: ASYNC110 - the board tells nobody
            await asyncio.sleep(0.005)


async def test_a_model_needs_a_session_an_engine_and_its_own_tokenizer() -> None:
    shelf, online, awaited = Shelf(), True, set[str]()
    board = ModelRegistry(shelf.fetch, lambda: online, lambda name: name in awaited)
    running = asyncio.create_task(board.run())
    try:
        assert status_of(board) == 503
        board.update([served(sha="a"), served("broken")])
        assert status_of(board, "other") == 404
        await until(board, 200)
        assert board.ready
        assert status_of(board, "broken") == 503
        board.update([served(engines=0)])
        assert (status_of(board), board.ready) == (503, False)
        board.update([served(sha="b")])
        assert status_of(board) == 503
        shelf.sha = "b"
        await until(board, 200)
        online = False
        assert (status_of(board), board.ready) == (503, False)
        awaited.add("m")
        assert (status_of(board), board.ready, board.serves("m")) == (200, False, False)
    finally:
        running.cancel()
        await asyncio.wait({running})


async def test_a_model_is_listed_once_its_tokenizer_is_loaded() -> None:
    shelf = Shelf()
    board = ModelRegistry(shelf.fetch, lambda: True, lambda _: False, {"alias": "m", "other": "broken"})
    board.update([served(sha="a"), served("broken")])
    for name in ("m", "alias", "broken"):
        with pytest.raises(ApiError) as early:
            board.listed(name)
        assert (early.value.status, early.value.code) == (503, "tokenizer_unavailable")
    assert board.names == []
    await board.refresh()
    assert [name for name, _ in board.names] == ["m", "alias"]
    assert board.listed("alias").info.name == "m"
    with pytest.raises(ApiError) as broken:
        board.listed("other")
    assert broken.value.status == 503
    with pytest.raises(ApiError) as unknown:
        board.listed("mm")
    assert unknown.value.message == (
        "The model 'mm' does not exist. Did you mean 'm'? Served models: 'm', 'alias'."
    )
    # One whose engines are away can be asked: the request waits for them.
    board.update([served(sha="a", engines=0)])
    assert [name for name, _ in board.names] == ["m", "alias"]


async def test_an_engine_without_a_checksum_takes_any_tokenizer() -> None:
    shelf = Shelf()
    board = ModelRegistry(shelf.fetch, lambda: True, lambda _: False)
    running = asyncio.create_task(board.run())
    try:
        board.update([served()])
        await until(board, 200)
        board.update([served()])
        await asyncio.sleep(0)
        assert shelf.fetches == 1
    finally:
        running.cancel()
        await asyncio.wait({running})
