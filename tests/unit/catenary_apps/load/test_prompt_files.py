from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catenary_apps.load import (
    Conversation,
    FileLimits,
    Turn,
    lines_conversations,
    parse_lengths,
    sharegpt_conversations,
)

EIGHT = parse_lengths("8")


def _words(text: str) -> int:
    return len(text.split())


def _said(*texts: str, first: str = "human") -> dict[str, Any]:
    roles = ("human", "gpt") if first == "human" else ("gpt", "human")
    messages = [{"from": roles[index % 2], "value": text} for index, text in enumerate(texts)]
    return {"id": "x", "conversations": messages}


def _load(tmp_path: Path, entries: Any, count: int = 100, **fields: Any) -> list[Conversation]:
    path = tmp_path / "sharegpt.json"
    path.write_bytes(entries if isinstance(entries, bytes) else json.dumps(entries).encode())
    return sharegpt_conversations(path, count, **{"counter": _words, **fields})


def test_questions_are_asked_and_answers_are_as_long_as_in_the_file(tmp_path: Path) -> None:
    entry = _said("one two three four", "a b c d e", "and then what now", "x y z w")
    assert _load(tmp_path, [entry]) == [Conversation((Turn("one two three four", 5),))]
    both = Conversation((Turn("one two three four", 5), Turn("and then what now", 4)))
    assert _load(tmp_path, [entry], turns=3) == [both]
    assert _load(tmp_path, [entry], outputs=EIGHT)[0].turns[0].output_tokens == 8


def test_names_of_openai_are_known_too_and_what_a_machine_said_first_is_left_out(tmp_path: Path) -> None:
    openai = {
        "messages": [{"role": "user", "content": "a b c d"}, {"role": "assistant", "content": "e f g h"}]
    }
    late = _said("never asked", "a b c d", "e f g h", first="gpt")
    asked = [Conversation((Turn("a b c d", 4),))]
    assert _load(tmp_path, [openai]) == asked
    assert _load(tmp_path, [late]) == asked


def test_what_does_not_fit_is_left_out(tmp_path: Path) -> None:
    entries = [
        _said("too short", "a b c d e"),
        _said("w " * 1025, "a b c d e"),
        _said("w " * 1000, "w " * 1049),
        _said("no answer at all"),
        {"conversations": []},
        _said("x" * 1_000_000, "a b c d"),
        _said("this one fits in", "a b c d"),
    ]
    assert [conversation.turns[0].prompt for conversation in _load(tmp_path, entries)] == ["this one fits in"]
    limits = FileLimits(max_prompt_tokens=2000, max_total_tokens=4000)
    assert len(_load(tmp_path, entries, limits=limits)) == 3


def test_the_seed_chooses_the_order(tmp_path: Path) -> None:
    entries = [_said(f"question number {index} is", "a b c d") for index in range(50)]
    first = _load(tmp_path, entries, 10, seed=1)
    assert first == _load(tmp_path, entries, 10, seed=1)
    assert first != _load(tmp_path, entries, 10, seed=2)
    assert len(first) == 10


GOOD = json.dumps(_said("a b c d", "e f g h")).encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no array of ShareGPT conversations"),
        (b"{}", "no array of ShareGPT conversations: Expected `array`, got `object`"),
        (b"[%b, %b" % (GOOD, GOOD[:-3]), "no array of ShareGPT conversations"),
        (b"[" * 1_000_000, "no array of ShareGPT conversations: it is nested too deeply"),
        (b"[1]", "entry 0 (from 0) is no conversation: Expected `object`"),
        (
            b'[%b, {"conversations": 1}]' % GOOD,
            "entry 1 (from 0) is no conversation: Expected `array`, got `int`",
        ),
        (
            b'[%b, %b, {"conversations": [{"from": "human", "value": [1]}]}]' % (GOOD, GOOD),
            "entry 2 (from 0) is no conversation: Expected `str | null`, got `array` - at `$.convers",
        ),
        (b'[{"conversations": [{"value": "\xff"}]}]', "entry 0 (from 0) is no conversation: it is not UTF-8"),
        (b"[]", "has no conversation within the limits"),
    ],
)
def test_what_is_no_such_file_is_refused_in_one_line(tmp_path: Path, data: bytes, said: str) -> None:
    with pytest.raises(ValueError) as refused:
        _load(tmp_path, data)
    assert "\n" not in str(refused.value)
    assert "sharegpt.json" in str(refused.value)
    assert said in str(refused.value)


def test_no_more_is_read_than_the_bound(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        _load(tmp_path, b"[" + b" " * 200 + b"]", limits=FileLimits(max_bytes=100))
    with pytest.raises(ValueError, match="No such file"):
        sharegpt_conversations(tmp_path / "none", 1, counter=_words)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["conversations", "from", "value", "role"]), inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(json_values)
def test_any_json_is_read_or_refused(tmp_path: Path, value: Any) -> None:
    with suppress(ValueError):
        assert _load(tmp_path, value)


def test_lines_hold_texts_or_ids(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text('{"prompt": "a"}\n\n{"prompt": [1, 2], "output_tokens": 3}\n{"prompt": "c"}\n')
    expected = [
        Conversation((Turn("a", 8),)),
        Conversation((Turn((1, 2), 3),)),
        Conversation((Turn("c", 8),)),
    ]
    assert lines_conversations(path, 10, outputs=EIGHT) == expected
    assert lines_conversations(path, 2, outputs=EIGHT) == expected[:2]


@pytest.mark.parametrize(
    "line",
    [
        *("x", "{}", '{"prompt": ""}', '{"prompt": []}', '{"prompt": 1}', "[" * 100_000, ""),
        *('{"prompt": "a", "output_tokens": 0}', '{"prompt": "a", "max_tokens": 4}'),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "lines"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n' if line else "\n")
    with pytest.raises(ValueError, match="line 2" if line else "no prompts"):
        lines_conversations(path, 10, outputs=EIGHT)
