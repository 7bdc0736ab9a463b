"""A sequence's tokens as text, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from catenary.text import Detokenizer, StopScanner


def stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """One stop string, or several, as a tuple. Raises ValueError if one is empty."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(stops):
        raise ValueError("a stop string must not be empty")
    return stops


class TextReader:
    """Decodes one sequence. Text is held back while it may be the beginning of a stop string."""

    def __init__(self, decoder: Detokenizer, stops: Sequence[str], min_tokens: int) -> None:
        """`min_tokens`: among so many first tokens no stop string is looked for."""
        self._decoder = decoder
        self._scanner = StopScanner(stops) if stops else None
        self._min_tokens = min_tokens
        self.tokens = 0
        """Tokens read, up to the one that completed a stop string."""
        self.stopped = False
        """A stop string was found; it is not part of the text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that the next tokens make certain. What stands behind a stop string is not read."""
        texts = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.tokens += 1
            texts.append(self._scanned(self._decoder.push(token_id)))
        return "".join(texts)

    def finish(self) -> str:
        """The rest, once nothing follows."""
        text = self._scanned(self._decoder.flush())
        if self._scanner is None or self.stopped:
            return text
        return text + self._scanner.flush()

    def _scanned(self, text: str) -> str:
        if self._scanner is None or self.tokens <= self._min_tokens or not text:
            return text
        scan = self._scanner.feed(text)
        self.stopped = scan.matched is not None
        return scan.text
