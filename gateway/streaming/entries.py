"""Log probabilities of tokens, and where these stand in the text."""

from __future__ import annotations

from typing import NamedTuple


class TokenLogprob(NamedTuple):
    """Natural-log probabilities of one token and of the best alternatives, best first."""

    sampled: float
    top_ids: tuple[int, ...]
    top_values: tuple[float, ...]


class LogprobEntry(NamedTuple):
    """A token whose text has been shown.

    token_id: its id; offset: the character of the shown text at which it begins; logprob: None for the first
    token of a prompt, which nothing precedes; data: the bytes of the text that it stands for, None for a
    token that is left out of the text."""

    token_id: int
    offset: int
    logprob: TokenLogprob | None
    data: bytes | None


def cut_bytes(begun: bytes, data: bytes, shown: str) -> bytes:
    """What of a token's bytes belongs to the characters `shown`, if the rest of its text is not shown.

    `begun`: the bytes in front of the token that begin the first of these characters."""
    for length in range(len(data)):
        if (begun + data[:length]).decode("utf-8", "replace") == shown:
            return data[:length]
    return data
