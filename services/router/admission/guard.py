"""The count of what is live: taken before the first await, given back exactly once."""

from __future__ import annotations

from dataclasses import dataclass

from services.router.fleet import Engine


@dataclass(slots=True, eq=False)
class Ledger:
    """What the whole router holds: live sequences and the prompt tokens that came with them."""

    sequences: int = 0
    tokens: int = 0


class LoadGuard:
    """One sequence's share of the router's load and of one engine's.

    It counts from its construction, which therefore stands before the first await of a request: a burst
    that arrives within one tick sees its own load and does not herd. `release` may be called any number of
    times from any path; only the first one counts. A released guard cannot be placed again.
    """

    __slots__ = ("_engine", "_ledger", "_released", "sequences", "tokens")

    def __init__(self, ledger: Ledger, tokens: int, sequences: int = 1) -> None:
        self.tokens = tokens
        # More than one for a beam search.
        self.sequences = sequences
        self._ledger = ledger
        self._engine: Engine | None = None
        self._released = False
        ledger.sequences += sequences
        ledger.tokens += tokens

    @property
    def engine(self) -> Engine | None:
        """The engine that carries the load now."""
        return self._engine

    def place(self, engine: Engine) -> None:
        """Put the load on `engine`, taking it off the one that had it."""
        if self._released:
            return
        self._unplace()
        engine.placed_sequences += self.sequences
        engine.placed_tokens += self.tokens
        self._engine = engine

    def release(self) -> None:
        """Give everything back. Idempotent."""
        if self._released:
            return
        self._released = True
        self._unplace()
        self._ledger.sequences -= self.sequences
        self._ledger.tokens -= self.tokens

    def _unplace(self) -> None:
        if self._engine is None:
            return
        self._engine.placed_sequences -= self.sequences
        self._engine.placed_tokens -= self.tokens
        self._engine = None
