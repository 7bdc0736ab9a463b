"""Consistent hash with bounded load: the same key goes to the same engine as long as that is not overfull."""

from __future__ import annotations

import math
from hashlib import blake2b
from itertools import islice

import numpy as np
import numpy.typing as npt

from services.router.placement.policy import Candidates, Choice, PlacementPolicy, PlacementRequest, register

# Tokens from the start of a prompt that make its key. Prompts that begin alike so far go to one engine.
KEY_TOKENS = 256


@register("consistent_hash")
class ConsistentHash(PlacementPolicy):
    """Rendezvous hashing: each pair of key and engine has a number, and the highest one wins.

    When an engine leaves, only its keys move; routers agree without talking, and an engine that starts again
    under its name gets its keys back. An engine that has `load_factor` times the mean number of sequences
    takes no more (Mirrokni, Thorup and Zadimoghaddam, Consistent Hashing with Bounded Loads).
    """

    def pick(self, request: PlacementRequest, candidates: Candidates) -> Choice:
        """See PlacementPolicy."""
        columns = candidates.columns
        sequences = candidates.of(columns.sequences)
        total = float(sequences.sum()) + request.sequences
        bound = math.ceil(self._options.load_factor * total / len(candidates))
        weights = _mixed(candidates.of(columns.identity) ^ np.uint64(key_of(request)))
        first = int(weights.argmax())
        if sequences[first] + request.sequences <= bound:
            return Choice(first, "ring")
        # One that has no more than the mean is always within the bound, unless the request counts for many.
        free = sequences + request.sequences <= bound
        if not free.any():
            free = sequences == sequences.min()
        return Choice(int(np.where(free, weights, 0).argmax()), "ring_overflow")


def key_of(request: PlacementRequest) -> int:
    """Return 64 bits of the session, or without one of the prompt's first tokens; never of its length."""
    digest = blake2b(digest_size=8)
    if request.session_id:
        digest.update(b"session" + request.session_id.encode())
    else:
        digest.update(b"prompt" + len(request.salt).to_bytes(8, "little") + request.salt)
        digest.update(np.fromiter(islice(request.token_ids, KEY_TOKENS), dtype="<u4").tobytes())
    return int.from_bytes(digest.digest(), "little")


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread each number over all 64 bits: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
