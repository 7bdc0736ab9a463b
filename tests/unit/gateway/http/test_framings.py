"""How requests are framed: bytes of a body are never read as a request, however they arrive."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.framing_readers import by_h11, by_node
from tests.support.framings import CHUNKED, FRAMINGS, Framing
from tests.support.http_protocol import MemoryConnection

AFTER = b"GET /after HTTP/1.1\r\nHost: a\r\n\r\n"
NAMED = pytest.mark.parametrize("framing", FRAMINGS, ids=[each.name for each in FRAMINGS])


def splits(data: bytes) -> Iterator[list[bytes]]:
    """Ways in which the bytes may arrive: at once, head and body, byte by byte, and cut in two."""
    yield [data]
    head, end, body = data.partition(b"\r\n\r\n")
    yield [part for part in (head + end, body) if part]
    yield [data[at : at + 1] for at in range(len(data))]
    for at in range(1, len(data), 7):
        yield [data[:at], data[at:]]


async def verdict(framing: Framing, parts: list[bytes]) -> str:
    """What the table says of it, the number of consumed bytes left out."""
    connection = MemoryConnection()
    for part in parts:
        await connection.send(part)
    if not connection.statuses:
        found = "waits"
    else:
        body = connection.requests[0][1] if connection.requests else "-"
        state = "open" if connection.transport.state == "open" else "closed"
        found = f"{connection.statuses[0]}/{body} {state}"
    await connection.send(AFTER)
    paths = [path for path, _ in connection.requests]
    assert "/smuggled" not in paths
    assert ("/after" in paths) == found.endswith("open"), paths
    assert len(connection.statuses) <= 2
    connection.close()
    return found


def without_consumed(framing: Framing) -> str:
    return re.sub(r" @\d+", "", framing.ours)


@NAMED
async def test_each_framing_is_read_alike_however_it_arrives(framing: Framing) -> None:
    for parts in splits(framing.data):
        assert await verdict(framing, parts) == without_consumed(framing), parts


@NAMED
@pytest.mark.advisory("CVE-2025-43859")
async def test_each_framing_ends_where_the_table_says(framing: Framing) -> None:
    connection = MemoryConnection()
    for at in range(len(framing.data)):
        await connection.send(framing.data[at : at + 1])
    said = re.search(r"@(\d+)", framing.ours)
    assert connection.ended_at == (int(said[1]) if said else None)
    connection.close()


@NAMED
async def test_what_follows_in_the_same_packet_is_no_part_of_a_request(framing: Framing) -> None:
    connection = MemoryConnection()
    await connection.send(framing.data + AFTER)
    assert {path for path, _ in connection.requests} <= {"/x", "/", "*"}
    wanted = framing.ours.split("/")[0]
    # A body that is not whole yet takes what follows.
    assert wanted == "waits" or connection.statuses == [int(wanted)]
    assert wanted == "waits" or connection.transport.state in ("open", "closed", "lingering")
    if wanted == "200" and framing.name != "empty line behind the body":
        assert connection.transport.state != "open", "a pipelined request ends the connection"
    connection.close()


@NAMED
def test_h11_reads_it_as_the_table_says(framing: Framing) -> None:
    assert by_h11(framing.data) == framing.h11


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_node_reads_them_as_the_table_says() -> None:
    found = by_node([framing.data for framing in FRAMINGS])
    assert dict(zip([framing.name for framing in FRAMINGS], found, strict=True)) == {
        framing.name: framing.node for framing in FRAMINGS
    }


@NAMED
@pytest.mark.advisory("CVE-2025-43859")
def test_what_is_served_has_the_same_body_for_other_readers(framing: Framing) -> None:
    if (read := re.match(r"200/(\d+)", framing.ours)) is not None:
        assert framing.node == read[1]
        assert framing.h11 in (read[1], "refused")


@st.composite
def damaged(draw: st.DrawFn) -> tuple[bytes, list[int]]:
    """A framing of the table with some bytes changed, and where it is cut."""
    data = bytearray(draw(st.sampled_from(FRAMINGS)).data)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data) - 1))
        byte = draw(st.sampled_from(b"\r\n :;,=0159afx\t\0\x80-+"))
        change = draw(st.sampled_from(["replace", "insert", "delete"]))
        data[at : at + (change != "insert")] = b"" if change == "delete" else bytes([byte])
    return bytes(data), sorted(draw(st.lists(st.integers(1, max(1, len(data) - 1)), max_size=5, unique=True)))


@given(damaged())
async def test_a_request_is_read_alike_wherever_it_is_cut(case: tuple[bytes, list[int]]) -> None:
    data, cuts = case
    found = []
    ends = [*cuts, len(data)]
    for parts in ([data], [data[start:end] for start, end in zip([0, *cuts], ends, strict=True)]):
        connection = MemoryConnection()
        for part in parts:
            await connection.send(part)
        # Whether a second request is read at all depends on when it comes.
        found.append((connection.statuses[:1], connection.requests[:1]))
        connection.close()
    assert found[0] == found[1]


def test_the_table_is_wide_enough() -> None:
    names = [framing.name for framing in FRAMINGS]
    assert len(set(names)) == len(names) >= 60


async def test_a_trailer_is_no_part_of_the_head() -> None:
    seen = []
    connection = MemoryConnection()
    head = b"POST /x HTTP/1.1\r\nHost: a\r\n" + CHUNKED + b"\r\n\r\n"
    await connection.send(head)
    scope = connection.protocol.scope
    await connection.send(b"0\r\nAuthorization: Bearer k\r\nHost: b\r\n\r\n")
    seen = [name for name, _ in scope["headers"]]
    assert seen == [b"host", b"transfer-encoding"]
    assert connection.statuses == [200]
    connection.close()


async def test_a_trailer_of_too_many_fields_is_refused() -> None:
    connection = MemoryConnection(max_headers=8)
    head = b"POST /x HTTP/1.1\r\nHost: a\r\n" + CHUNKED + b"\r\n\r\n"
    await connection.send(head + b"0\r\n" + b"X: a\r\n" * 9 + b"\r\n")
    assert connection.statuses == [431]
    connection.close()


async def test_garbage_behind_a_whole_request_does_not_cost_its_answer() -> None:
    connection = MemoryConnection()
    await connection.send(AFTER + b"\x00\x01\x02")
    assert connection.requests == [("/after", 0)]
    assert connection.statuses == [200]
    assert connection.transport.state == "lingering"
    connection.close()


async def test_empty_lines_do_not_keep_an_idle_connection() -> None:
    connection = MemoryConnection()
    await connection.send(AFTER)
    for _ in range(3):
        await connection.send(b"\r\n")
    assert connection.protocol.timeout_keep_alive_task is not None
    await connection.send(AFTER)
    assert connection.statuses == [200, 200]
    connection.close()


async def test_a_refused_client_that_sends_on_is_cut_at_the_limit() -> None:
    connection = MemoryConnection(max_discarded_bytes=1000)
    await connection.send(b"GET /x HTTP/1.1\r\nBad Field: 1\r\n\r\n" + AFTER)
    assert (connection.statuses, connection.transport.state) == ([400], "lingering")
    await connection.send(AFTER * 10)
    assert connection.transport.state == "lingering"
    await connection.send(AFTER * 30)
    assert connection.transport.state == "closed"
    assert connection.requests == []
    connection.close()


async def test_without_lingering_a_refusal_closes_at_once() -> None:
    connection = MemoryConnection(linger_s=0.0)
    await connection.send(b"\x00")
    assert (connection.statuses, connection.transport.state) == ([400], "closed")
    connection.close()


async def test_a_refusal_that_is_never_read_does_not_keep_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection = MemoryConnection(stall_s=0.0)
    monkeypatch.setattr(connection.transport, "get_write_buffer_size", lambda: 100)
    await connection.send(b"\x00")
    assert (connection.statuses, connection.transport.state) == ([400], "closed")
    connection.close()
