"""Admission: a bounded number of live sequences and tokens, nothing while draining."""

from __future__ import annotations

from dataclasses import dataclass

from catenary.v1 import common_pb2
from services.router.admission.guard import Ledger, LoadGuard
from services.router.admission.refusal import Refused


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
        """Sequences admitted and not released."""
        return self._ledger.sequences

    @property
    def live_tokens(self) -> int:
        """Prompt tokens of those."""
        return self._ledger.tokens

    @property
    def draining(self) -> bool:
        """True once nothing new is admitted."""
        return self._draining

    def drain(self) -> None:
        """Admit nothing from here on."""
        self._draining = True

    def admit(self, tokens: int, sequences: int = 1, *, resumed: bool = False) -> LoadGuard:
        """Count a request of `tokens` prompt tokens in, which is so many sequences in its engine.

        Those that were admitted before, by a router that is gone perhaps, may pass the limits by as much
        again.

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
