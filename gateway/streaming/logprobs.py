"""Log probabilities in the two shapes of the API."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.streaming.sequence_text import LogprobEntry
from gateway.text.vocabulary import Vocabulary

FLOOR = -9999.0
"""What is written for a token that cannot be sampled: JSON has no infinity."""


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Four arrays of one length; `text_offset` counts characters from the start of the completion."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


def chat_logprobs(entries: Sequence[LogprobEntry], vocabulary: Vocabulary) -> ChatLogprobs:
    """The `logprobs` object of a chat choice."""
    content = []
    for entry in entries:
        data = vocabulary.token_bytes(entry.token_id)
        top = []
        for token_id, value in zip(entry.logprob.top_ids, entry.logprob.top_values, strict=True):
            other = vocabulary.token_bytes(token_id)
            top.append(TopLogprob(token_name(other), _finite(value), list(other)))
        content.append(ChatLogprob(token_name(data), _finite(entry.logprob.sampled), list(data), top))
    return ChatLogprobs(content)


def completion_logprobs(entries: Sequence[LogprobEntry], vocabulary: Vocabulary) -> CompletionLogprobs:
    """The `logprobs` object of a completion choice.

    Where alternatives were asked for, the sampled token is always among them."""
    names = [token_name(vocabulary.token_bytes(entry.token_id), "bytes:") for entry in entries]
    values = [_finite(entry.logprob.sampled) for entry in entries]
    tops: list[dict[str, float]] = []
    for entry, name, value in zip(entries, names, values, strict=True):
        top: dict[str, float] = {}
        for token_id, other in zip(entry.logprob.top_ids, entry.logprob.top_values, strict=True):
            top.setdefault(token_name(vocabulary.token_bytes(token_id), "bytes:"), _finite(other))
        if top:
            top.setdefault(name, value)
        tops.append(top)
    offsets = [entry.offset for entry in entries]
    return CompletionLogprobs(names, values, tops if any(tops) else None, offsets)


def token_name(data: bytes, prefix: str = "") -> str:
    """A token's text, or where that is no whole characters its bytes in hex, which stay unique."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{value:02x}" for value in data)


def _finite(value: float) -> float:
    return value if value > FLOOR else FLOOR
