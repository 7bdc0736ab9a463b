"""Route receipts: what was known when a sequence was placed, and why it went where it went."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from catenary.v1 import engine_pb2, router_pb2
from services.router.placement.policy import Candidates, Choice, Floats, Rows
from services.router.placement.request import Half

# Candidates that a receipt lists.
MAX_LISTED = 16
_HALVES = {
    Half.WHOLE: router_pb2.ROUTE_HALF_WHOLE,
    Half.PROMPT: router_pb2.ROUTE_HALF_PROMPT,
    Half.REST: router_pb2.ROUTE_HALF_REST,
}


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
class Listed:
    """The same of several, as they were; made into candidates when a receipt is asked for, which is rare."""

    engines: list[tuple[str, str, engine_pb2.LoadReport | None, engine_pb2.Capacity]]
    scores: list[float] | None
    matched: tuple[list[int], list[bool]] | None
    sequences: list[float]
    prefill: list[float]

    def candidate(self, number: int) -> Candidate:
        """One of them."""
        instance_id, name, report, capacity = self.engines[number]
        return Candidate(
            instance_id=instance_id,
            engine_name=name,
            score=None if self.scores is None else self.scores[number],
            matched_tokens=0 if self.matched is None else self.matched[0][number],
            match_is_exact=False if self.matched is None else self.matched[1][number],
            sequences=int(self.sequences[number]),
            queued_prefill_tokens=int(self.prefill[number]),
            used_blocks=0 if report is None else report.used_blocks,
            total_blocks=capacity.total_blocks,
        )


@dataclass(frozen=True, slots=True)
class Receipt:
    """One decision."""

    request_id: str
    model: str
    policy: str
    time_ms: int
    prompt_tokens: int
    listed: Listed
    considered: int
    chosen: str
    lease_epoch: int
    reason: str
    queued_ms: int
    decision_us: int
    placement: int
    matched_tokens: int
    half: Half

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Best first, at most MAX_LISTED of the `considered` ones."""
        return tuple(map(self.listed.candidate, range(len(self.listed.engines))))

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
            half=_HALVES[self.half],
        )

    def attributes(self) -> dict[str, str | int | list[str] | list[int] | list[float]]:
        """The attributes of its span."""
        candidates = self.candidates
        told: dict[str, str | int | list[str] | list[int] | list[float]] = {
            "catenary.sequence_id": self.request_id,
            "gen_ai.request.model": self.model,
            "catenary.route.policy": self.policy,
            "catenary.route.reason": self.reason,
            "catenary.route.half": self.half.name.lower(),
            "catenary.route.placement": self.placement,
            "catenary.route.chosen": self.chosen,
            "catenary.route.lease_epoch": self.lease_epoch,
            "catenary.route.considered": self.considered,
            "catenary.route.prompt_tokens": self.prompt_tokens,
            "catenary.route.matched_tokens": self.matched_tokens,
            "catenary.route.queued_ms": self.queued_ms,
            "catenary.route.decision_us": self.decision_us,
            "catenary.route.candidates": [one.instance_id for one in candidates],
            "catenary.route.candidates.matched_tokens": [one.matched_tokens for one in candidates],
            "catenary.route.candidates.sequences": [one.sequences for one in candidates],
        }
        scores = [one.score for one in candidates if one.score is not None]
        if scores:
            told["catenary.route.candidates.score"] = scores
        return told

    def summary(self) -> dict[str, Any]:
        """The fields of a line of the log."""
        return {
            "sequence": self.request_id,
            "policy": self.policy,
            "reason": self.reason,
            "half": self.half.name.lower(),
            "considered": self.considered,
            "prompt_tokens": self.prompt_tokens,
            "matched_tokens": self.matched_tokens,
            "placement": self.placement,
            "decision_us": self.decision_us,
        }


def listed(candidates: Candidates, choice: Choice) -> Listed:
    """The candidates that a receipt lists: the best ones by score, and the chosen one in any case."""
    if choice.scores is None:
        return _chosen_alone(candidates, choice.position)
    best = _best(choice.scores)
    if choice.position not in best:
        best[-1] = choice.position
    looked, board, rows = candidates.looked, candidates.board, candidates.rows[best]
    engines = [board.engines[row] for row in rows.tolist()]
    return Listed(
        engines=[(engine.instance_id, engine.name, engine.report, engine.capacity) for engine in engines],
        scores=choice.scores[best].tolist(),
        matched=None if looked is None else (looked.tokens[best].tolist(), looked.exact[best].tolist()),
        sequences=board.sequences[rows].tolist(),
        prefill=board.prefill[rows].tolist(),
    )


def _chosen_alone(candidates: Candidates, position: int) -> Listed:
    looked, board, engine = candidates.looked, candidates.board, candidates.engine(position)
    matched = None if looked is None else ([int(looked.tokens[position])], [bool(looked.exact[position])])
    return Listed(
        engines=[(engine.instance_id, engine.name, engine.report, engine.capacity)],
        scores=None,
        matched=matched,
        sequences=[float(board.sequences[engine.row])],
        prefill=[float(board.prefill[engine.row])],
    )


def _best(scores: Floats) -> Rows:
    """Positions of the lowest scores, lowest first."""
    best = np.arange(len(scores))
    if len(scores) > MAX_LISTED:
        best = np.argpartition(scores, MAX_LISTED)[:MAX_LISTED]
    return best[np.argsort(scores[best], kind="stable")]


class ReceiptBook:
    """The latest receipts, and what all of them since the start add up to.

    `decisions`: how many by policy and reason.
    """

    def __init__(self, capacity: int) -> None:
        self._receipts: deque[Receipt] = deque(maxlen=capacity)
        self.decisions: Counter[tuple[str, str]] = Counter()
        self.prompt_tokens = 0
        self.matched_tokens = 0

    def __len__(self) -> int:
        return len(self._receipts)

    def add(self, receipt: Receipt) -> None:
        """Keep a receipt; the oldest one goes."""
        self._receipts.append(receipt)
        self.decisions[receipt.policy, receipt.reason] += 1
        self.prompt_tokens += receipt.prompt_tokens
        self.matched_tokens += receipt.matched_tokens

    def find(self, request_id: str | None, limit: int) -> list[Receipt]:
        """Receipts of one request, or of all with None: newest first, at most `limit`."""
        found = (
            receipt
            for receipt in reversed(self._receipts)
            if request_id is None or receipt.request_id == request_id
        )
        return list(islice(found, limit))
