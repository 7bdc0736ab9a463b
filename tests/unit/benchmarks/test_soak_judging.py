"""What a soak calls a leak."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.soaking.clients import Counts, Neighbour
from benchmarks.soaking.judging import GROWTH, Process, Sample, faults, growth

MIB = 1 << 20


def process(pid: int, mib: float, **fields: Any) -> Process:
    size = round(mib * MIB)
    return replace(Process(pid, size, size + 50 * MIB, size, 20, 5), **fields)


def sample(rest: bool, books: dict[str, float] | None = None, **processes: list[Process]) -> Sample:
    return Sample(0.0, rest, processes, books or {"running": 0.0})


def window(mib: float, *, pid: int = 1, books: dict[str, float] | None = None, **fields: Any) -> list[Sample]:
    """A minute under load and a rest, with one process of so many MiB."""
    loaded = [sample(False, {"running": 7.0}, engine=[process(pid, mib)]) for _ in range(5)]
    return [*loaded, sample(True, books, engine=[process(pid, mib, **fields)])]


@pytest.mark.parametrize(
    ("before", "after", "allowed"),
    [
        (100, 116, True),
        (100, 116.1, False),
        (1000, 1030, True),
        (1000, 1030.1, False),
        (1000, 900, True),
        (100, 100, True),
    ],
)
def test_a_process_may_grow_by_a_share_or_some_mebibytes(before: float, after: float, allowed: bool) -> None:
    assert GROWTH.allows(before * MIB, after * MIB) == allowed
    lines = faults(window(before), window(after))
    assert (lines == []) == allowed
    if not allowed:
        assert lines == [
            f"engine grew {what} from {before:.1f} to {after:.1f} MiB" for what in ("under load", "at rest")
        ]


def test_under_load_a_median_is_compared_and_at_rest_what_is_left() -> None:
    peak = sample(False, engine=[process(1, 900)])
    assert faults(window(100), [peak, *window(100)]) == []
    grown = growth(window(100), [*window(100)[:-1], *window(130)[-1:]])
    assert [(one.what, one.after / MIB) for one in grown] == [("under load", 100.0), ("at rest", 130.0)]


def test_pages_of_files_are_no_growth() -> None:
    assert faults(window(100), window(100, rss=900 * MIB, pss=900 * MIB)) == []


def test_books_that_are_not_zero_at_rest() -> None:
    open_books = {"running": 0.0, "used blocks": 3.0}
    assert faults(window(9), window(9, books=open_books)) == ["used blocks is 3 at rest at the end"]
    assert faults(window(9, books={"running": 1.0}), window(9)) == ["running is 1 at rest after settling"]
    gone = faults(window(9, books={"running": 0.0, "waiting": 0.0}), window(9))
    assert gone == ["waiting is no longer told"]


def test_descriptors_that_stay_open() -> None:
    assert faults(window(9), window(9, descriptors=21)) == [
        "engine has 21 descriptors open at rest where it had 20"
    ]
    assert faults(window(9), window(9, descriptors=19)) == []


def test_a_service_that_was_started_anew_is_a_fault_and_a_worker_is_not() -> None:
    assert faults(window(9), window(9, pid=2)) == ["engine ended: process 1"]
    assert faults(window(9, replaceable=True), window(9, pid=2, replaceable=True)) == []


def test_workers_of_one_name_are_compared_by_size() -> None:
    settled = [sample(True, w=[process(1, 50), process(2, 100)])]
    last = [sample(True, w=[process(2, 100), process(3, 70, replaceable=True)])]
    assert [one.after - one.before for one in growth(settled, last)] == [0, 20 * MIB]
    fewer = [sample(True, w=[process(2, 100)])]
    assert faults(settled, fewer) == ["w ended: process 1", "w: 1 processes where there were 2"]


def test_a_run_that_never_rested_proves_nothing() -> None:
    assert faults(window(9)[:-1], window(9)) == ["no sample at rest: the books were never compared"]


def test_answers_that_no_sound_server_gives(capsys: pytest.CaptureFixture[str]) -> None:
    counts = Counts()
    for status in (400, 503, 429):
        counts.expect("hostile", status, (400,), b"")
    assert not counts.unexpected
    counts.expect("hostile", 500, (400,), b"oh")
    counts.expect("hostile", 500, (400,), b"oh")
    assert counts.unexpected == {"hostile: 500: oh": 2}
    assert counts.answers["hostile"]["500"] == 2
    assert capsys.readouterr().out == "FAULT: hostile: 500: oh\n"


@pytest.mark.parametrize(
    ("last", "outcome"), [('{"choices": []}', "200"), ('{"error": {"message": "lost"}}', "broken stream")]
)
async def test_a_stream_that_ends_with_an_error_is_a_fault(last: str, outcome: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in ('{"choices": [{"text": "a"}]}', last, "[DONE]"):
            data = f"data: {event}\n\n".encode()
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        writer.write(b"0\r\n\r\n")
        writer.close()

    counts = Counts()
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        neighbour = Neighbour(counts, f"http://{host}:{port}", "m")
        await neighbour.turn()
    assert counts.answers == {"neighbour": {outcome: 1}}
    assert bool(counts.unexpected) == (outcome != "200")
    assert list(neighbour.texts) == (["a"] if outcome == "200" else [])
