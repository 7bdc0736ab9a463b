"""How much of an engine's KV is taken, between its reports too."""

from __future__ import annotations


class KvLoad:
    """Tokens of KV that an engine holds or is about to hold.

    What was placed since its last report is added to the report; so is what was placed in the interval
    before, which the report may not have seen yet. What ended since is taken off. An estimate: an engine that
    has less room than it seems lets sequences wait, and one with more shows it in its next report.
    """

    __slots__ = ("_aging", "_fresh", "_released", "_reported", "_reports")

    def __init__(self) -> None:
        self._reported = 0
        self._fresh = 0
        self._aging = 0
        self._released = 0
        self._reports = 0

    @property
    def held(self) -> int:
        """The estimate, in tokens."""
        return max(0, self._reported - self._released) + self._fresh + self._aging

    def report(self, tokens: int) -> None:
        """The engine says that it holds `tokens`, or has accepted to."""
        self._reported = tokens
        self._aging, self._fresh = self._fresh, 0
        self._released = 0
        self._reports += 1

    def place(self, tokens: int) -> int:
        """It is given so many more. Returns the mark to release them with."""
        self._fresh += tokens
        return self._reports

    def release(self, mark: int, tokens: int) -> None:
        """A placed sequence has ended."""
        if mark == self._reports:
            self._fresh -= tokens
        elif mark == self._reports - 1:
            self._aging -= tokens
        else:
            self._released += tokens
