from __future__ import annotations

import json
import statistics
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_apps.load import answers
from catenary_apps.load.answers import Answer, EventReader, EventTooLarge, error_text

lines = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)
events = st.lists(st.lists(lines, min_size=1, max_size=3), max_size=5)


def _wire(given_events: list[list[str]], end: str, colon: str) -> bytes:
    blocks = ["".join(f"data:{colon}{line}{end}" for line in event) + end for event in given_events]
    return (f": a comment{end}{end}id: x{end}{end}" + "".join(blocks)).encode()


@given(events, st.sampled_from(["\n", "\r\n"]), st.lists(st.integers(0, 300), max_size=8))
def test_events_are_the_same_however_the_bytes_are_cut(
    wanted: list[list[str]], end: str, cuts: list[int]
) -> None:
    data = _wire(wanted, end, " ")
    reader, found, last = EventReader(), [], 0
    for cut in [*sorted(cuts), len(data)]:
        found += reader.feed(data[last:cut])
        last = max(last, cut)
    joined = ["\n".join(event).encode() for event in wanted]
    assert found == [(b"", data) for data in joined if data]


def test_the_space_after_the_colon_may_be_missing() -> None:
    assert EventReader().feed(b'data:{"a":1}\n\ndata: \n\n') == [(b"", b'{"a":1}')]


def test_events_have_names() -> None:
    wire = b"event: error\n\nevent:x\ndata: y\n\n"
    assert EventReader().feed(wire) == [(b"error", b""), (b"x", b"y")]


def test_what_came_of_a_large_event_is_not_copied_for_each_part() -> None:
    reader, part, peaks = EventReader(), b"x" * 1000, []
    assert reader.feed(b"data: " + b"x" * 1_000_000) == []
    tracemalloc.start()
    for _ in range(50):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        assert reader.feed(part) == []
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    # A buffer that grows is moved now and then.
    assert statistics.median(peaks) < 100_000
    assert reader.feed(b"\r\n\r") == []
    assert reader.feed(b"\n") == [(b"", b"x" * 1_050_000)]


def test_an_event_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_EVENT_BYTES", 100)
    reader = EventReader()
    reader.feed(b"data: " + b"x" * 90)
    with pytest.raises(EventTooLarge):
        reader.feed(b"x" * 90)


def _answer(*parts: object, streamed: bool = True, status: int = 200) -> Answer:
    """Each part comes a second after the one before it."""
    answer = Answer(keeps_text=True)
    answer.head(status, b"text/event-stream; charset=utf-8" if streamed else b"application/json")
    for now, part in enumerate(parts, 1):
        text = part if isinstance(part, str) else json.dumps(part)
        answer.body(f"data: {text}\n\n".encode() if streamed else text.encode(), float(now))
    return answer


@pytest.mark.parametrize(
    ("wire", "detail"),
    [
        (b"event: error\n\n", "without a word about it"),
        (b"event: error\ndata:\n\n", "without a word about it"),
        (b'event: error\ndata: {"message": "no memory"}\n\n', "no memory"),
        (b"event: error\r\ndata: broken\r\n\r\n", "broken"),
    ],
)
def test_an_event_called_error_is_a_failure(wire: bytes, detail: str) -> None:
    answer = _answer(_delta(content="a"))
    answer.body(wire, 2.0)
    answer.body(b"data: [DONE]\n\n", 3.0)
    assert (answer.done, answer.failure, answer.detail, answer.ended) == (True, "error_event", detail, 2.0)


def _delta(finish: str | None = None, **fields: object) -> dict[str, object]:
    return {"id": "x", "choices": [{"index": 0, "delta": fields, "finish_reason": finish, "logprobs": None}]}


USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}


def test_chunks_count_when_something_was_generated_and_tokens_are_those_of_usage() -> None:
    answer = _answer(
        _delta(role="assistant", content=""),
        _delta(content="a"),
        _delta(reasoning_content="b"),
        _delta(tool_calls=[{"index": 0}]),
        _delta("stop"),
        {"choices": [], "usage": USAGE},
        "[DONE]",
    )
    assert list(answer.moments) == [2.0, 3.0, 4.0]
    assert (answer.done, answer.failure, answer.ended, answer.text) == (True, None, 7.0, "a")
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (7, 4, 5)


def test_a_completion_has_texts() -> None:
    choice = {"index": 0, "text": "ab", "finish_reason": None}
    answer = _answer({"choices": [choice]}, {"choices": [choice | {"finish_reason": "length"}]}, "[DONE]")
    assert (list(answer.moments), answer.text, answer.failure) == ([1.0, 2.0], "abab", None)


@pytest.mark.parametrize(
    ("parts", "failure"),
    [
        ([_delta(content="a")], "cut"),
        ([_delta(content="a"), "{"], "bad_answer"),
        (["[1]"], "bad_answer"),
        (["[" * 100_000], "bad_answer"),
        (["[DONE]"], "bad_answer"),
        ([_delta(content="a"), {"error": {"message": "it broke", "code": 500}}], "error_event"),
        ([{"error": "it broke"}], "error_event"),
        ([_delta(content="a"), _delta("abort")], "error_event"),
    ],
)
def test_what_is_wrong_with_a_stream_has_a_name(parts: list[object], failure: str) -> None:
    answer = _answer(*parts)
    answer.complete(9.0)
    assert answer.failure == failure
    assert answer.done
    if failure == "error_event":
        assert answer.detail in ("it broke", "finish_reason abort")


def test_a_refusal_says_what_the_server_says() -> None:
    answer = _answer({"error": {"message": "too\nmany"}}, streamed=False, status=429)
    answer.complete(2.0)
    assert (answer.failure, answer.detail) == ("http_429", "too many")
    answer = _answer({"choices": []}, streamed=False)
    answer.complete(2.0)
    assert answer.failure == "bad_answer"


def test_an_answer_that_was_finished_needs_no_done() -> None:
    for hang_up in (False, True):
        answer = _answer(_delta("stop", content="a"))
        if hang_up:
            answer.lost(3.0, "gone")
        else:
            answer.complete(3.0)
        assert (answer.failure, answer.ended) == (None, 3.0)


@given(st.binary(max_size=300))
def test_any_refusal_is_one_short_line(body: bytes) -> None:
    text = error_text(body)
    assert len(text) <= 200
    assert "\n" not in text
