"""The way to a beam's last token. Beams share the beginnings of theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Candidate: TypeAlias = tuple[int, float]
"""A token id with the natural log probability that the search adds up."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A generated token with its log probability, and the best alternatives at its place."""

    token_id: int
    logprob: float
    top: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Trail:
    """A token and how it was reached; `before` is None for the first that was generated."""

    before: Trail | None
    token: ScoredToken

    def tokens(self) -> tuple[ScoredToken, ...]:
        """All tokens, from the first on."""
        backwards = [self.token]
        trail = self.before
        while trail is not None:
            backwards.append(trail.token)
            trail = trail.before
        return tuple(reversed(backwards))
