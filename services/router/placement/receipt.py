"""Route receipts: what was known when a sequence was placed, and why it went where it went."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from catenary.v1 import router_pb2
from services.router.placement.candidates import Candidates, Choice

# Candidates that a receipt lists.
MAX_LISTED = 16


class Candidate(NamedTuple):
    """One engine as the policy saw it. `score`: lower is better; None for one that was only listed."""

    instance_id: str
    engine_name: str
    score: float | None
    matched_tokens: int
    match_is_exact: bool
    sequences: int
    queued_prefill_tokens: int
    used_blocks: int
    total_blocks: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """One decision. `candidates`: best first, at most MAX_LISTED of the `considered` ones."""

    request_id: str
    model: str
    policy: str
    time_ms: int
    prompt_tokens: int
    candidates: tuple[Candidate, ...]
    considered: int
    chosen: str
    lease_epoch: int
    reason: str
    queued_ms: int
    decision_us: int
    placement: int
    matched_tokens: int

    def message(self) -> router_pb2.RouteReceipt:
        """As it is told by Explain."""
        return router_pb2.RouteReceipt(
            request_id=self.request_id,
            model=self.model,
            policy=self.policy,
            time_ms=self.time_ms,
            prompt_tokens=self.prompt_tokens,
            candidates=[router_pb2.RouteCandidate(**one._asdict()) for one in self.candidates],
            considered=self.considered,
            chosen=self.chosen,
            lease_epoch=self.lease_epoch,
            reason=self.reason,
            queued_ms=self.queued_ms,
            decision_us=self.decision_us,
            placement=self.placement,
        )

    def summary(self) -> dict[str, Any]:
        """What a line of the log says."""
        return {
            "sequence": self.request_id,
            "policy": self.policy,
            "reason": self.reason,
            "considered": self.considered,
            "prompt_tokens": self.prompt_tokens,
            "matched_tokens": self.matched_tokens,
            "placement": self.placement,
            "decision_us": self.decision_us,
        }


def listed(candidates: Candidates, choice: Choice) -> tuple[Candidate, ...]:
    """What a receipt tells of the candidates: the best ones by score, and the chosen one in any case."""
    if choice.scores is None:
        return (_candidate(candidates, choice.position, None),)
    scores = choice.scores
    best = np.arange(len(scores))
    if len(scores) > MAX_LISTED:
        best = np.argpartition(scores, MAX_LISTED)[:MAX_LISTED]
    best = best[np.argsort(scores[best], kind="stable")]
    if choice.position not in best:
        best[-1] = choice.position
    return tuple(
        _candidate(candidates, position, score)
        for position, score in zip(best.tolist(), scores[best].tolist(), strict=True)
    )


def _candidate(candidates: Candidates, position: int, score: float | None) -> Candidate:
    engine, looked = candidates.engine(position), candidates.looked
    return Candidate(
        instance_id=engine.instance_id,
        engine_name=engine.name,
        score=score,
        matched_tokens=0 if looked is None else int(looked.tokens[position]),
        match_is_exact=False if looked is None else bool(looked.exact[position]),
        sequences=engine.sequences,
        queued_prefill_tokens=engine.prefill,
        used_blocks=0 if engine.report is None else engine.report.used_blocks,
        total_blocks=engine.capacity.total_blocks,
    )


class ReceiptBook:
    """The latest receipts."""

    def __init__(self, capacity: int) -> None:
        self._receipts: deque[Receipt] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._receipts)

    def add(self, receipt: Receipt) -> None:
        """Keep a receipt; the oldest one goes."""
        self._receipts.append(receipt)

    def find(self, request_id: str | None, limit: int) -> list[Receipt]:
        """Receipts of one request, or of all with None: newest first, at most `limit`."""
        found = (
            receipt
            for receipt in reversed(self._receipts)
            if request_id is None or receipt.request_id == request_id
        )
        return list(islice(found, limit))
