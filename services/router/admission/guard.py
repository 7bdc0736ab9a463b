"""Admission of live sequences and tokens within bounds, none while draining, and the count of them.

A load is counted before the first await and released exactly once. Each class reserves places on a model's
engines against the classes below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from catenary.v1 import common_pb2
from services.router.admission.lanes import LANES
from services.router.admission.validation import Refused
from services.router.fleet import Engine


@dataclass(slots=True)
class ClassLoad:
    """Sequences that engines have, by the class of their arrival. Changed by LoadGuard alone."""

    placed: list[int] = field(default_factory=lambda: [0 for _ in LANES])


class ClassQuota:
    """The places of a model's engines, and those that each class reserves.

    Of `total` places, class c reserves floor(share_c * total) against the classes below it, which leave them
    free even while class c does not use them. `foreign` places are taken by others than this router. A total
    of 0 says that none is known, and no class is held back then.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = tuple(shares)
        self.load = ClassLoad()
        self.total = 0
        self.foreign = 0
        self._reserved = [0 for _ in LANES]

    def update(self, total: int, foreign: int) -> None:
        """Take over the places of the engines as they are now."""
        if total != self.total:
            self._reserved = [int(share * total) for share in self._shares] + [0] * (
                len(LANES) - len(self._shares)
            )
        self.total, self.foreign = total, foreign

    def reserved(self, lane: int) -> int:
        """ClassQuota that a class keeps from lower ones."""
        return self._reserved[lane]

    def admits(self, lane: int, sequences: int) -> bool:
        """Whether a class leaves enough to the higher ones if it takes so many places more."""
        if not self.total or not any(self._reserved[:lane]):
            return True
        placed = self.load.placed
        idle = sum(max(0, self._reserved[each] - placed[each]) for each in range(lane))
        # More than it could ever get: then all that it can get.
        wanted = min(sequences, max(1, self.total - sum(self._reserved[:lane])))
        return self.total - self.foreign - sum(placed) - wanted >= idle


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
        """The engine that has the load now."""
        return self._engine

    def classify(self, load: ClassLoad, lane: int) -> None:
        """Count in `load` from here on, while an engine carries it, as one of class `lane`."""
        self._load, self._lane = load, lane

    def place(self, engine: Engine, prefill: int, *, kv_tokens: int | None = None) -> None:
        """Put the load on `engine`, with `prefill` tokens to compute, taking it off the one that had it.

        `kv_tokens`: tokens of KV that `engine` has to find room for; None: as many as before.
        """
        if self._released:
            return
        self.unplace()
        if kv_tokens is not None:
            self.kv_tokens = kv_tokens
        engine.placed_sequences += self.sequences
        engine.placed_tokens += self.tokens
        engine.placed_prefill += prefill
        self._mark = engine.kv.place(self.kv_tokens)
        if self._load is not None:
            self._load.placed[self._lane] += self.sequences
        self._engine, self._prefill = engine, prefill

    def prefilled(self) -> None:
        """Count the prompt as computed. Idempotent."""
        if self._engine is not None:
            self._engine.placed_prefill -= self._prefill
            self._prefill = 0

    def release(self) -> None:
        """Release the load. Idempotent."""
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


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of what the router holds at once."""

    max_live_sequences: int
    max_live_tokens: int
    retry_after_ms: int


class Admission:
    """Admits sequences within the limits and counts them."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._ledger = Ledger()
        self._draining = False

    @property
    def live_sequences(self) -> int:
        return self._ledger.sequences

    @property
    def live_tokens(self) -> int:
        return self._ledger.tokens

    @property
    def draining(self) -> bool:
        """Whether nothing new is admitted."""
        return self._draining

    def drain(self) -> None:
        """Admit nothing from here on."""
        self._draining = True

    def admit(self, tokens: int, sequences: int = 1, *, resumed: bool = False) -> LoadGuard:
        """Count a request of `tokens` prompt tokens in, which is so many sequences in its engine.

        Sequences that are resumed, after the loss of a router perhaps, may pass the limits by as much again.

        Raises:
            Refused: DRAINING after `drain`; OVERLOADED with a retry time when a limit would be passed.
        """
        limits = self._limits
        if self._draining:
            raise Refused(
                common_pb2.ERROR_CODE_DRAINING,
                "The router is shutting down.",
                retryable=True,
                retry_after_ms=limits.retry_after_ms,
            )
        share = 2 if resumed else 1
        if self._ledger.sequences + sequences > share * limits.max_live_sequences:
            raise self._overloaded(f"{limits.max_live_sequences} live sequences (max-live-sequences)")
        if self._ledger.tokens + tokens > share * limits.max_live_tokens:
            raise self._overloaded(f"{limits.max_live_tokens} live prompt tokens (max-live-tokens)")
        return LoadGuard(self._ledger, tokens, sequences)

    def _overloaded(self, limit: str) -> Refused:
        return Refused(
            common_pb2.ERROR_CODE_OVERLOADED,
            f"The router is full: its limit is {limit}. Try again later.",
            retryable=True,
            retry_after_ms=self._limits.retry_after_ms,
        )
