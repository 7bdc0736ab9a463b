"""Cost: the work before a sequence's first token, less its cached prefix. The default."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from services.router.placement.policy import (
    Candidates,
    Choice,
    Floats,
    Memory,
    PlacementPolicy,
    PlacementRequest,
    lowest,
    overloaded,
    register,
)

# Share of the KV or of the slots taken above which pressure grows no more.
_FULL = 0.99
# Share of the mean below which an engine's running work counts as that share: an empty engine is worth so
# much and no more, lest one that has just started takes what others have cached.
_COLD = 0.5


@register("cost")
class Cost(PlacementPolicy):
    """Picks the lowest cost, in tokens of prefill, at random among equals.

    The cost of an engine is the prompt tokens that it has yet to compute, queued by its report or sent since;
    the tokens of this prompt that it has not cached; `decode_weight` times the KV tokens of what it runs; and
    `pressure_weight` * (k / (1 - k))**2, where k is the share of its KV or of its slots that is taken,
    whichever is larger: little up to half, and more than any prefix is worth when it is nearly full.

    If no engine has `min_match` of the prompt, or the one of lowest cost is overloaded, what is cached counts
    for nothing, and the least loaded one by the rest of the cost is taken. An engine whose report is older
    than `stale_s` counts as saturated: it is chosen only if all are.
    """

    memory: ClassVar[Memory] = Memory.UNTOLD

    def pick(self, request: PlacementRequest, candidates: Candidates) -> Choice:
        """See PlacementPolicy."""
        cached = candidates.matched().tokens
        if len(candidates) == 1:
            return Choice(0, "only_one")
        busy = self._busy(candidates)
        length = len(request.token_ids)
        longest = int(cached.max())
        if longest and longest >= self._options.min_match * length:
            scores = busy + (length - cached)
            position = lowest(scores, self._rng)
            if not overloaded(candidates, self._options)[position]:
                return Choice(position, "lowest_cost", scores)
        scores = busy + length
        return Choice(lowest(scores, self._rng), "least_loaded", scores)

    def _busy(self, candidates: Candidates) -> Floats:
        """Return the work of each engine, in tokens of prefill."""
        options, columns, of = self._options, candidates.columns, candidates.of
        kv_tokens = of(columns.kv_tokens)
        used = of(columns.tokens) / kv_tokens
        # In tokens of the mean engine, so that unequal engines fill up alike.
        mean = float(kv_tokens.sum()) / len(kv_tokens)
        cold = _COLD * float(used.sum()) / len(used)
        busy: Floats = np.maximum(used, cold) * (options.decode_weight * mean)
        busy += of(columns.prefill)
        taken = np.minimum(np.maximum(used, of(columns.sequences) / of(columns.slots)), _FULL)
        busy += options.pressure_weight * np.square(taken / (1 - taken))
        stale = of(columns.reported_at) < candidates.now - options.stale_s
        if stale.any() and not stale.all():
            busy[stale] = np.inf
        return busy
