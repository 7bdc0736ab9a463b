"""The parser of one choice's text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from gateway.parsing.events import Part
from gateway.parsing.output import Output
from gateway.parsing.source import Scan, Source
from gateway.parsing.stops import Stop


class TextParser:
    """Drives a scanner: an `OutputParser`."""

    def __init__(self, source: Source, output: Output, scan: Scan[None]) -> None:
        """`scan` reads `source` to its end into `output`."""
        self._source = source
        self._output = output
        self._scan = scan

    @property
    def stop(self) -> Stop | None:
        """The stop string at which the answer ended."""
        return self._output.stop

    @property
    def settled(self) -> int:
        """Characters of the text that no stop string can cut away any more."""
        return self._output.settled

    def search_from(self, place: int) -> None:
        """Look for stop strings only from this character of the text on."""
        self._output.search_from(place)

    @property
    def called(self) -> bool:
        """Whether a whole call was read."""
        return self._output.complete_calls > 0

    def reasoning_tokens(self, offsets: Sequence[int]) -> int:
        """How many of the tokens that begin at these characters of the text (rising) are reasoning."""
        count = 0
        for first, last in self._output.spans:
            end = len(offsets) if last is None else bisect_left(offsets, last)
            count += end - bisect_left(offsets, first)
        return count

    def feed(self, text: str) -> list[Part]:
        """As in `OutputParser`."""
        if text:
            self._source.feed(text)
            next(self._scan, None)
        return self._output.drain()

    def finish(self) -> list[Part]:
        """As in `OutputParser`."""
        self._source.ended = True
        next(self._scan, None)
        self._output.finish()
        return self._output.drain()
