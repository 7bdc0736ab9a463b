"""Lines of batches: however the file is cut, and whatever is in it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary.telemetry import new_id
from gateway.batches.job import (
    LineError,
    LineResult,
    check_lines,
    read_line,
    result_line,
    split_lines,
    unrun_line,
)

URL = "/v1/completions"


async def pieces_of(data: bytes, cuts: list[int]) -> AsyncIterator[bytes]:
    start = 0
    for cut in [*sorted(cuts), len(data)]:
        yield data[start:cut]
        start = max(start, cut)


def split(data: bytes, cuts: list[int], most: int = 1000) -> list[tuple[int, bytes | None]]:
    async def read() -> list[tuple[int, bytes | None]]:
        return [found async for found in split_lines(pieces_of(data, cuts), most)]

    return asyncio.run(read())


@given(st.lists(st.text("ab \r", max_size=8)), st.booleans(), st.data())
def test_any_cut_gives_the_same_lines(lines: list[str], ends: bool, data: st.DataObject) -> None:
    text = "\n".join(lines).encode() + (b"\n" if ends else b"")
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    found = text.split(b"\n")
    if not found[-1]:
        found.pop()
    expected = [
        (number, None if len(line) > 5 else line if line.strip() else b"")
        for number, line in enumerate(found, 1)
    ]
    assert split(text, cuts, 5) == expected


@given(st.lists(st.integers(0, 20), max_size=8))
def test_a_byte_order_mark_is_left_out_in_front_of_the_file_alone(cuts: list[int]) -> None:
    mark = b"\xef\xbb\xbf"
    assert split(mark + b"abcde\n" + mark + b"x\n" + mark, cuts, 5) == [
        (1, b"abcde"),
        (2, mark + b"x"),
        (3, mark),
    ]
    assert split(mark, cuts) == []


async def check(data: bytes, most: int = 10_000, values: int = 10_000) -> tuple[int, list[str]]:
    total, problems = await check_lines(split_lines(pieces_of(data, []), 1 << 20), URL, most, values)
    return total, [problem.code for problem in problems]


async def test_blank_lines_count_against_a_limit() -> None:
    line = json.dumps(GOOD).encode() + b"\n"
    assert await check(b"\n \r\n" + line, most=2) == (1, [])
    assert await check(b"\n\n\n" + line, most=2) == (0, ["too_many_lines"])
    assert await check(b"\n" * 5, most=5) == (0, ["empty_file"])


async def test_others_have_the_loop_between_any_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little a step takes: turns last no time here."""
    monkeypatch.setattr("gateway.http.request.TURN_S", 0.0)
    line = b'{"custom_id":"a","method":"POST","url":"%s","body":{"a":[%s]}}\n'
    for data, steps, found in (
        (b"\n" * 20_000, 9000, ["too_many_lines"]),
        (line % (URL.encode(), b",".join([b"[]"] * 200_000)), 8, ["line_too_long"]),
        (b" \n" * 9000 + line % (URL.encode(), b"1"), 8000, []),
    ):
        went_round = 0

        async def others() -> None:
            nonlocal went_round
            while True:
                await asyncio.sleep(0)
                went_round += 1

        neighbour = asyncio.create_task(others())
        _, problems = await check(data, values=100_000)
        neighbour.cancel()
        assert problems == found
        assert went_round >= steps


GOOD = {"custom_id": "a", "method": "POST", "url": URL, "body": {"model": "m"}}


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"", "invalid_json_line"),
        (b"[]", "invalid_json_line"),
        (b'{"custom_id": NaN}', "invalid_json_line"),
        (b"[" * 100_000, "invalid_json_line"),
        (b"\xff", "invalid_json_line"),
        ({**GOOD, "custom_id": 1}, "invalid_custom_id"),
        ({**GOOD, "custom_id": ""}, "invalid_custom_id"),
        ({**GOOD, "custom_id": "x" * 513}, "invalid_custom_id"),
        ({**GOOD, "method": "get"}, "invalid_method"),
        ({**GOOD, "url": "http://elsewhere/v1/completions"}, "mismatched_endpoint"),
        ({**GOOD, "body": "x"}, "invalid_body"),
        ({**GOOD, "x": 1}, "unknown_parameter"),
    ],
)
def test_bad_lines(line: Any, code: str) -> None:
    data = line if isinstance(line, bytes) else json.dumps(line).encode()
    with pytest.raises(LineError) as caught:
        read_line(3, data, URL)
    assert (caught.value.code, caught.value.problem(3).line) == (code, 3)


def test_a_good_line() -> None:
    line = read_line(3, json.dumps(GOOD).encode(), URL)
    assert (line.number, line.custom_id, line.body) == (3, "a", {"model": "m"})


def test_problems_are_bounded() -> None:
    async def check() -> tuple[int, int]:
        data = b"x\n" * 1000
        total, problems = await check_lines(split_lines(pieces_of(data, []), 10), URL, 10_000, 10_000)
        return total, len(problems)

    assert asyncio.run(check()) == (100, 100)


def test_lines_of_results() -> None:
    made = json.loads(result_line("a", LineResult(200, "req-1", b'{"x": 1}'), new_id))
    assert made.pop("id").startswith("batch_req_")
    assert made == {
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "req-1", "body": {"x": 1}},
        "error": None,
    }
    gone = json.loads(unrun_line("b", "batch_expired", "late", new_id))
    assert (gone["response"], gone["error"]) == (None, {"code": "batch_expired", "message": "late"})
