"""The prompt, repeated in front of its choices."""

from __future__ import annotations

from collections.abc import Sequence

from catenary.text import Detokenizer
from gateway.streaming.entries import LogprobEntry, TokenLogprob


class Echo:
    """A prompt's text, decoded from its tokens with what decodes the choices too: a character that the
    prompt begins and a choice ends stands where it ends."""

    __slots__ = ("_detokenizer", "_ids", "_places", "text")

    def __init__(self, detokenizer: Detokenizer, ids: Sequence[int]) -> None:
        """`detokenizer`: one that begins with nothing; it is used up."""
        texts: list[str] = []
        self._places: list[tuple[int, bytes | None]] = []
        offset = 0
        for token_id in ids:
            text = detokenizer.push(token_id)
            self._places.append((offset, detokenizer.last_bytes(token_id, text)))
            offset += len(text)
            texts.append(text)
        self._ids = ids
        self._detokenizer = detokenizer
        self.text = "".join(texts)

    def detokenizer(self) -> Detokenizer:
        """What goes on from the prompt's end."""
        return self._detokenizer.fork()

    def entries(self, logprobs: Sequence[TokenLogprob]) -> tuple[LogprobEntry, ...]:
        """All tokens with their log probabilities, of which the first one has none."""
        return tuple(
            LogprobEntry(token_id, offset, logprob, data)
            for token_id, (offset, data), logprob in zip(
                self._ids, self._places, (None, *logprobs), strict=True
            )
        )
