"""Stop strings against a naive reference that looks at the whole text after each character."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from catenary.text import StopScanner

small = st.text(alphabet="abc", min_size=1, max_size=4)
stop_lists = st.lists(small, min_size=1, max_size=4)
pieces = st.lists(st.text(alphabet="abcd", max_size=5), max_size=12)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """What is shown in the end: up to the match that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def scan(parts: list[str], stops: list[str]) -> tuple[list[str], bool]:
    scanner = StopScanner(stops)
    shown = []
    for part in parts:
        result = scanner.feed(part)
        shown.append(result.text)
        if result.matched:
            return shown, True
    return [*shown, scanner.flush()], False


@given(pieces, stop_lists)
def test_every_split_gives_what_the_whole_text_gives(parts: list[str], stops: list[str]) -> None:
    shown, matched = scan(parts, stops)
    assert ("".join(shown), matched) == naive("".join(parts), stops)


@given(pieces, stop_lists)
def test_text_is_held_back_only_while_it_may_still_match(parts: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    read = shown = ""
    for part in parts:
        result = scanner.feed(part)
        read += part
        shown += result.text
        if result.matched:
            return
        held = read[len(shown) :]
        assert len(held) == scanner.held
        assert not held or any(stop.startswith(held) for stop in stops)
        longer = [read[-size:] for size in range(len(held) + 1, len(read) + 1)]
        assert not any(stop.startswith(tail) for stop in stops for tail in longer if len(tail) < len(stop))


def test_the_first_complete_match_wins() -> None:
    assert scan(["abcd"], ["abcd", "bc"]) == (["a"], True)


def test_of_two_that_end_together_the_longer_wins() -> None:
    assert scan(["xabc"], ["bc", "abc"]) == (["x"], True)


def test_a_match_over_pieces_shows_nothing_of_itself() -> None:
    assert scan(["DEF", "G", "HI", "J", "K"], ["DEFGHIJ"]) == (["", "", "", ""], True)


def test_a_broken_off_match_is_given_back() -> None:
    assert scan(["aab", "aac"], ["aabaab"]) == (["", "aabaac", ""], False)
