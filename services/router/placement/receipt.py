"""Route receipts: what was known when a sequence was placed, and why it went where it went."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from catenary.v1 import router_pb2

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
