"""The count of what is live: taken before the first await, given back exactly once."""

from __future__ import annotations

from dataclasses import dataclass

from services.router.admission.places import ClassLoad
from services.router.fleet import Engine


@dataclass(slots=True, eq=False)
class Ledger:
    """The content of the whole router: live sequences and the prompt tokens that came with them."""

    sequences: int = 0
    tokens: int = 0


class LoadGuard:
    """One sequence's share of the router's load and of one engine's.

    It counts from its construction, which therefore stands before the first await of a request: a burst
    that arrives within one tick sees its own load and does not herd. `release` may be called any number of
    times from any path; only the first one counts. A released guard cannot be placed again.
    """

    __slots__ = (
        "_engine",
        "_lane",
        "_ledger",
        "_load",
        "_mark",
        "_prefill",
        "_released",
        "kv_tokens",
        "sequences",
        "tokens",
    )

    def __init__(self, ledger: Ledger, tokens: int, sequences: int = 1) -> None:
        self.tokens = tokens
        # More than one for a beam search.
        self.sequences = sequences
        # Tokens of KV that its next engine has to find room for.
        self.kv_tokens = tokens
        self._ledger = ledger
        self._load: ClassLoad | None = None
        self._lane = 0
        self._mark = 0
        self._engine: Engine | None = None
        self._prefill = 0
        self._released = False
        ledger.sequences += sequences
        ledger.tokens += tokens

    @property
    def engine(self) -> Engine | None:
        """The engine that carries the load now."""
        return self._engine

    def classify(self, load: ClassLoad, lane: int) -> None:
        """Count in `load` from here on, while an engine carries it, as one of class `lane`."""
        self._load, self._lane = load, lane

    def place(self, engine: Engine, prefill: int) -> None:
        """Put the load on `engine`, with `prefill` tokens to compute, taking it off the one that had it."""
        if self._released:
            return
        self.unplace()
        engine.placed_sequences += self.sequences
        engine.placed_tokens += self.tokens
        engine.placed_prefill += prefill
        self._mark = engine.kv.place(self.kv_tokens)
        if self._load is not None:
            self._load.placed[self._lane] += self.sequences
        self._engine, self._prefill = engine, prefill

    def prefilled(self) -> None:
        """The prompt is computed. Idempotent."""
        if self._engine is not None:
            self._engine.placed_prefill -= self._prefill
            self._prefill = 0

    def release(self) -> None:
        """Give everything back. Idempotent."""
        if self._released:
            return
        self._released = True
        self.unplace()
        self._ledger.sequences -= self.sequences
        self._ledger.tokens -= self.tokens

    def unplace(self) -> None:
        """Take the load off the engine that has it, if one has."""
        if self._engine is None:
            return
        self.prefilled()
        self._engine.placed_sequences -= self.sequences
        self._engine.placed_tokens -= self.tokens
        self._engine.kv.release(self._mark, self.kv_tokens)
        if self._load is not None:
            self._load.placed[self._lane] -= self.sequences
        self._engine = None
