"""Options that tune the policies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """Numbers of the policies; the router's options of the same names describe them.

    `min_match`, `skew_sequences` and `skew_ratio` are the bounds that SGLang's gateway uses for its
    cache-aware policy, `load_factor` is that of its bounded hashing.
    """

    min_match: float = 0.5
    skew_sequences: int = 32
    skew_ratio: float = 1.1
    load_factor: float = 1.25
    decode_weight: float = 0.125
    pressure_weight: float = 50.0
    stale_s: float = 2.0
    session_ttl_s: float = 7200.0
    max_sessions: int = 65_536
