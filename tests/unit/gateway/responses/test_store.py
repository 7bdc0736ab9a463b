"""The store of responses: whose they are, and what is forgotten."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from catenary.runtime import StartRefused
from gateway.errors import ApiError
from gateway.responses.objects import ResponseStatus, current_form, decode_response
from gateway.responses.service import Library
from gateway.responses.store import (
    SCHEMA,
    VERSION,
    ConversationTooLarge,
    EventBatch,
    ResponseStore,
    StoredEvents,
    StoredResponse,
    StoreLimits,
)
from gateway.state.database import Database


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def database_at(path: Path) -> Database:
    return Database(path, SCHEMA, VERSION)


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = database_at(tmp_path / "r.sqlite3")
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
def store(database: Database, clock: Clock) -> ResponseStore:
    return ResponseStore(database, StoreLimits(5, 1000, 100.0), clock=clock, elapsed=clock)


def record(response_id: str, previous: str | None = None, size: int = 10, **fields: object) -> StoredResponse:
    made = StoredResponse(
        response_id, "me", ResponseStatus.COMPLETED, previous, b'"%s"' % (b"r" * (size - 2)), b"0"
    )
    return replace(made, **fields)  # type: ignore[arg-type]


async def claimed(store: ResponseStore) -> list[str]:
    """The responses that a new gateway can claim now."""
    ids: list[str] = []
    while (claim := await store.claim("other", ids)) is not None:
        ids.append(claim[0].id)
    return ids


async def test_only_the_owner_sees_a_response(store: ResponseStore) -> None:
    await store.add(record("a"))
    assert await store.get("me", "a") == record("a")
    assert await store.get("you", "a") is None
    assert await store.conversation("you", "a", 1000) is None
    assert not await store.delete("you", "a")
    assert await store.delete("me", "a")
    assert await store.get("me", "a") is None


async def test_reading_needs_no_write(store: ResponseStore, database: Database, clock: Clock) -> None:
    await store.add(record("a"))
    await store.add(record("b", previous="a"))
    # As on a disk that has become read-only, or has no room.
    await database.fetch("PRAGMA query_only = ON")
    clock.now += 1
    assert await store.get("me", "a") == record("a")
    assert await store.conversation("me", "b", 1000) == [record("a"), record("b", previous="a")]
    with pytest.raises(ApiError) as refused:
        await store.delete("me", "a")
    assert (refused.value.status, refused.value.code) == (503, "store_unavailable")


async def test_a_conversation_is_whole_or_not_there(store: ResponseStore) -> None:
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        await store.add(record(name, previous))
    found = await store.conversation("me", "c", 33)
    assert found is not None
    assert [item.id for item in found] == ["a", "b", "c"]
    with pytest.raises(ConversationTooLarge):
        await store.conversation("me", "c", 32)
    await store.delete("me", "a")
    assert await store.conversation("me", "c", 1000) is None


async def test_a_conversation_through_somebody_elses_response_is_not_there(store: ResponseStore) -> None:
    await store.add(record("a", owner="you"))
    await store.add(record("b", "a"))
    assert await store.conversation("me", "b", 1000) is None


async def test_what_was_used_longest_ago_is_forgotten_first(store: ResponseStore, clock: Clock) -> None:
    for index in range(5):
        clock.now += 1
        await store.add(record(str(index)))
    clock.now += 1
    assert await store.get("me", "0")
    clock.now += 1
    await store.add(record("5"))
    assert [await store.get("me", str(index)) is not None for index in range(6)] == [
        *(True, False, True, True, True, True)
    ]


async def test_bytes_are_bounded(store: ResponseStore, clock: Clock) -> None:
    for name in "abc":
        clock.now += 1
        await store.add(record(name, size=400))
    assert [await store.get("me", name) is not None for name in "abc"] == [False, True, True]


async def test_age_counts_from_the_last_use(store: ResponseStore, clock: Clock) -> None:
    await store.add(record("a"))
    await store.add(record("b"))
    clock.now += 90
    assert await store.get("me", "a")
    clock.now += 20
    assert await store.get("me", "b") is None
    await store.sweep()
    assert await store.get("me", "a")


async def test_a_final_response_stays_as_it_is(store: ResponseStore) -> None:
    await store.add(record("a", status=ResponseStatus.QUEUED, runner="g"))
    assert await store.update("a", ResponseStatus.CANCELLED, b'"gone"')
    assert not await store.update("a", ResponseStatus.COMPLETED, b'"late"')
    found = await store.get("me", "a")
    assert found is not None
    assert (found.status, found.response) == (ResponseStatus.CANCELLED, b'"gone"')


async def test_leases(store: ResponseStore, clock: Clock) -> None:
    await store.add(record("a", status=ResponseStatus.QUEUED, runner="g"))
    await store.add(record("b", status=ResponseStatus.IN_PROGRESS, runner="h"))
    assert await store.jobs.renew("g", ["a", "b"]) == {"a": "queued"}
    clock.now += 9
    assert await store.jobs.renew("g", ["a", "b"]) == {"a": "queued"}
    clock.now += 5
    assert await claimed(store) == ["b"]
    await store.update("a", ResponseStatus.CANCELLED, b"0")
    assert await store.jobs.renew("g", ["a", "b"]) == {}


async def test_a_clock_that_is_set_ends_nobodys_responses(database: Database, clock: Clock) -> None:
    elapsed = Clock()
    store = ResponseStore(database, StoreLimits(5, 1000, 1e9), clock=clock, elapsed=elapsed)
    await store.add(record("lives", status=ResponseStatus.IN_PROGRESS, runner="g"))
    await store.add(record("died", status=ResponseStatus.IN_PROGRESS, runner="h"))
    for step in (25 * 3600, -50 * 3600):
        clock.now += step
        assert await claimed(store) == []
        assert await store.jobs.renew("g", ["lives"]) == {"lives": "in_progress"}
    for time_of in (clock, elapsed):
        time_of.now += 11
    await store.jobs.renew("g", ["lives"])
    assert await claimed(store) == ["died"]


async def test_what_is_worked_on_is_not_forgotten(store: ResponseStore, clock: Clock) -> None:
    for index in range(5):
        await store.add(record(str(index), status=ResponseStatus.QUEUED, runner="g"))
    clock.now += 1
    await store.add(record("5"))
    assert await store.get("me", "5") is None
    assert len(await store.jobs.renew("g", "01234")) == 5


async def test_two_gateways_share_a_file(store: ResponseStore, tmp_path: Path, clock: Clock) -> None:
    opened = database_at(tmp_path / "r.sqlite3")
    await opened.open()
    other = ResponseStore(opened, StoreLimits(5, 1000, 100.0), clock=clock, elapsed=clock)
    await store.add(record("a"))
    assert await other.get("me", "a") == record("a")
    await opened.close()


async def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"no database at all, but long enough to be looked at" * 100)
    with pytest.raises(StartRefused, match="x is no database"):
        await database_at(tmp_path / "x").open()
    with pytest.raises(StartRefused):
        await database_at(tmp_path / "no" / "x").open()


async def test_events_are_told_from_any_on(store: ResponseStore, clock: Clock) -> None:
    running = record("a", status=ResponseStatus.IN_PROGRESS, runner="g")
    await store.add(running, [b"0\n\n", b"1\n\n"])
    await store.add_events({"a": EventBatch(2, [b"2\n\n"]), "none": EventBatch(0, [b"x\n\n"])}, ())
    await store.add_events({"a": EventBatch(3, [b"3\n\n", b"4\n\n"])}, ())
    for after in range(-1, 7):
        found = await store.events("me", "a", after)
        assert found is not None
        assert list(found.events) == [b"%d\n\n" % number for number in range(after + 1, 5)]
        assert (found.kept, found.dropped, found.final) == (True, False, False)
    assert await store.events("you", "a", -1) is None
    clock.now += 20
    claim = await store.claim("h")
    assert claim is not None
    assert claim[1] == 5
    assert await store.update("a", ResponseStatus.COMPLETED, b"0", EventBatch(5, [b"5\n\n"]))
    assert not await store.update("a", ResponseStatus.FAILED, b"0", EventBatch(6, [b"6\n\n"]))
    await store.add_events({"a": EventBatch(6, [b"late\n\n"])}, ())
    assert await store.events("me", "a", 4) == StoredEvents([b"5\n\n"], True, False, True)


async def test_events_that_are_not_the_next_ones_are_not_taken(store: ResponseStore) -> None:
    await store.add(record("a", status=ResponseStatus.IN_PROGRESS), [b"0\n\n"])
    await store.add_events({"a": EventBatch(2, [b"2\n\n"])}, ())
    await store.add_events({"a": EventBatch(0, [b"again\n\n"])}, ())
    found = await store.events("me", "a", -1)
    assert found is not None
    assert found.events == [b"0\n\n"]


async def test_events_that_were_dropped_or_never_kept(store: ResponseStore) -> None:
    await store.add(record("a", status=ResponseStatus.IN_PROGRESS), [b"0\n\n"])
    await store.add(record("b"))
    await store.add_events({}, ["a", "b"])
    await store.add_events({"a": EventBatch(1, [b"1\n\n"])}, ())
    assert await store.events("me", "a", -1) == StoredEvents((), True, True, False)
    assert await store.events("me", "b", -1) == StoredEvents((), False, False, True)


async def test_bytes_of_events_count_and_go_with_their_response(
    store: ResponseStore, database: Database, clock: Clock
) -> None:
    await store.add(record("a", status=ResponseStatus.IN_PROGRESS), [b"x" * 500 + b"\n\n"])
    clock.now += 1
    await store.add(record("b", size=400))
    assert await store.get("me", "b")
    await store.update("a", ResponseStatus.COMPLETED, b"0")
    clock.now += 1
    await store.add(record("c", size=400))
    assert [await store.get("me", name) is not None for name in "abc"] == [False, True, True]
    assert await store.events("me", "a", -1) is None
    assert await database.fetch("SELECT * FROM events") == []


async def test_all_events_come_however_many_chunks_there_are(store: ResponseStore) -> None:
    await store.add(record("a", status=ResponseStatus.IN_PROGRESS), [])
    for number in range(100):
        await store.add_events({"a": EventBatch(number, [b"%d\n\n" % number])}, ())
    await store.update("a", ResponseStatus.COMPLETED, b"0")
    told: list[bytes] = []
    final = False
    while not final:
        found = await store.events("me", "a", len(told) - 1)
        assert found is not None
        told += found.events
        final = found.final
    assert told == [b"%d\n\n" % number for number in range(100)]


async def test_items_are_found_by_their_ids(store: ResponseStore, clock: Clock) -> None:
    output = b'{"output": [{"id": "o1", "text": "\\u4e16 \xe4\xb8\x96"}, {"id": "o2"}]}'
    await store.add(record("a", items=b'[{"id": "i1"}, {"id": "same", "n": 1}]', response=output))
    await store.add(record("b", items=b'[{"id": "same", "n": 2}]', status=ResponseStatus.QUEUED))
    await store.add(record("c", items=b'[{"id": "theirs"}]', owner="you"))
    wanted = ["o1", "o2", "i1", "same", "theirs", "none", "o3"]
    found = {name: json.loads(data) for name, data in (await store.items("me", wanted)).items()}
    assert found == {
        "o1": {"id": "o1", "text": "世 世"},
        "o2": {"id": "o2"},
        "i1": {"id": "i1"},
        "same": {"id": "same", "n": 2},
    }
    await store.update("b", ResponseStatus.COMPLETED, b'{"output": [{"id": "o3"}]}')
    assert (await store.items("me", ["o3"])).keys() == {"o3"}
    assert await store.items("you", ["o1"]) == {}
    await store.delete("me", "b")
    assert json.loads((await store.items("me", ["same"]))["same"])["n"] == 1
    many = [f"x{number}" for number in range(100)]
    assert (await store.items("me", [*many, "i1"])).keys() == {"i1"}
    clock.now += 101
    assert await store.items("me", wanted) == {}


OLD = {
    "id": "old",
    "object": "response",
    "created_at": 1,
    "status": "completed",
    "completed_at": 2,
    "background": True,
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": 5,
    "max_tool_calls": None,
    "model": "m",
    "output": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}],
            "status": "completed",
        }
    ],
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 0.5,
    "truncation": "disabled",
    "usage": None,
    "user": None,
    "metadata": {},
}
SAMPLING = {"temperature": 1.0, "top_p": 0.5, "presence_penalty": 0.0, "frequency_penalty": 0.0}
ASKED = [
    {"type": "message", "id": "msg_0", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
]


def old_record(name: str, **fields: object) -> StoredResponse:
    """A response as builds wrote it that told no penalties, and null for the model's own temperature."""
    response = json.dumps(OLD | {"id": name} | fields).encode()
    status = ResponseStatus(str(fields.get("status", "completed")))
    return record(name, status=status, response=response, items=json.dumps(ASKED).encode())


async def test_responses_of_older_builds_are_read(database: Database) -> None:
    store = ResponseStore(database, StoreLimits(5, 1 << 20, 100.0))
    await store.add(old_record("old"))
    # A long one is read beside the loop.
    await store.add(old_record("long", instructions="x" * (1 << 17)))
    await store.add(old_record("open", status="in_progress", output=[]))
    library = Library(store, 1 << 20)
    for name in ("old", "long"):
        assert json.loads((await library.get("me", name)).response).items() >= SAMPLING.items()
        assert json.loads(await library.cancel("me", name))["status"] == "completed"
    items = await library.conversation("me", "old")
    assert [type(item).__name__ for item in items] == ["ResponseMessage"] * 2
    cancelled = json.loads(await library.cancel("me", "open"))
    assert cancelled.items() >= (SAMPLING | {"status": "cancelled"}).items()
    # What this build writes is shown as it was stored.
    written = (await library.get("me", "open")).response
    assert json.loads(written) == cancelled
    assert current_form(written) is written


def test_a_stored_response_that_is_damaged_is_no_older_one() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_response(json.dumps(OLD | {"status": "lost"}).encode())
