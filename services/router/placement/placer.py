"""From a request to an engine, or to the reason why there is none."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from catenary.telemetry import get_logger
from catenary.v1 import common_pb2
from services.router.admission import Refused
from services.router.fleet import Engine, Fleet
from services.router.index import KvIndex
from services.router.placement.policy import Choice, PlacementPolicy
from services.router.placement.receipt import MAX_LISTED, Candidate, Receipt, ReceiptBook
from services.router.placement.request import PlacementRequest

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a sequence goes, and why."""

    engine: Engine
    receipt: Receipt


class Placer:
    """Asks a model's policy among the engines that can take the request.

    `policies`: those of models that have another one than `policy`. `clock` and `wall_clock` in seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        policy: PlacementPolicy,
        *,
        retry_after_ms: int,
        policies: Mapping[str, PlacementPolicy] | None = None,
        index: KvIndex[Engine] | None = None,
        receipts: ReceiptBook | None = None,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.fleet = fleet
        self._policy = policy
        self._policies = policies or {}
        self._retry_after_ms = retry_after_ms
        self._index = KvIndex(1) if index is None else index
        self._receipts = ReceiptBook(1) if receipts is None else receipts
        self._clock = clock
        self._wall_clock = wall_clock

    def place(self, request: PlacementRequest, *, excluding: Collection[Engine] = ()) -> Placed:
        """Choose an engine other than those in `excluding`.

        Raises:
            Refused: MODEL_NOT_FOUND; UNAVAILABLE if none of its engines serves; OVERLOADED if all are full.
        """
        began = self._clock()
        if not self.fleet.knows(request.model):
            raise Refused(
                common_pb2.ERROR_CODE_MODEL_NOT_FOUND, "The model does not exist here.", param="model"
            )
        serving = self.fleet.candidates(request.model, excluding=excluding, role=request.role)
        if not serving:
            raise Refused(
                common_pb2.ERROR_CODE_UNAVAILABLE,
                "No engine serves the model at the moment.",
                retryable=True,
                retry_after_ms=self._retry_after_ms,
            )
        free = [engine for engine in serving if engine.kept_for in (None, request)]
        roomy = self._roomy(request, free)
        policy = self._policies.get(request.model, self._policy)
        choice = self._beside(request, free) or policy.pick(request, roomy)
        if choice is None:
            raise Refused(
                common_pb2.ERROR_CODE_OVERLOADED,
                "All engines of the model are full. Try again later.",
                retryable=True,
                retry_after_ms=self._retry_after_ms,
            )
        request.placements += 1
        receipt = self._receipt(request, policy, choice, len(roomy), began)
        self._receipts.add(receipt)
        return Placed(choice.engine, receipt)

    def uncached_tokens(self, request: PlacementRequest) -> int:
        """Tokens of the request that the engine which has most of them cached would still compute."""
        most = max(self._matched(request).values(), default=0)
        return len(request.token_ids) - most

    def forget(self, engine: Engine) -> None:
        """`engine` left: nothing is known of it any more."""
        self._index.forget(engine)

    def _roomy(self, request: PlacementRequest, free: Sequence[Engine]) -> list[Engine]:
        if request.alone:
            return [engine for engine in free if not engine.sequences and not engine.full]
        needed = request.kv_tokens
        roomy = [engine for engine in free if engine.has_room(request.sequences, needed)]
        if not roomy and needed:
            # What is cached on an engine needs no room there.
            roomy = [
                engine
                for engine, matched in self._matched(request).items()
                if engine in free and engine.has_room(request.sequences, max(1, needed - matched))
            ]
        return roomy

    def _beside(self, request: PlacementRequest, free: Sequence[Engine]) -> Choice | None:
        beside = request.beside
        # The prompt is there already.
        if (
            beside is None
            or beside not in free
            or not beside.has_room(request.sequences, min(1, request.kv_tokens))
        ):
            return None
        return Choice(beside, "same_prompt")

    def _matched(self, request: PlacementRequest) -> dict[Engine, int]:
        """Tokens by engine. The last token is always computed: its output is what is wanted."""
        found: dict[Engine, int] = {}
        engines = self.fleet.candidates(request.model, role=request.role)
        for size in {engine.capacity.block_size for engine in engines}:
            blocks = self._index.match(request.names(size))
            for engine in engines:
                if engine.capacity.block_size == size and engine in blocks:
                    found[engine] = min(blocks[engine] * size, len(request.token_ids) - 1)
        return found

    def _receipt(
        self,
        request: PlacementRequest,
        policy: PlacementPolicy,
        choice: Choice,
        considered: int,
        began: float,
    ) -> Receipt:
        best = heapq.nsmallest(MAX_LISTED, choice.scores, key=itemgetter(1))
        listed = [_candidate(engine, score) for engine, score in best]
        receipt = Receipt(
            request_id=request.request_id,
            model=request.model,
            policy=policy.name,
            time_ms=int(self._wall_clock() * 1000),
            prompt_tokens=len(request.token_ids),
            candidates=tuple(listed or [_candidate(choice.engine, None)]),
            considered=considered,
            chosen=choice.engine.instance_id,
            lease_epoch=choice.engine.epoch,
            reason=choice.reason,
            queued_ms=request.queued_ms,
            decision_us=int((self._clock() - began) * 1e6),
            placement=request.placements,
            matched_tokens=0,
        )
        _log.debug(
            "route receipt",
            sequence=request.request_id,
            engine=choice.engine.name,
            policy=receipt.policy,
            reason=receipt.reason,
            considered=considered,
            matched_tokens=receipt.matched_tokens,
            placement=receipt.placement,
        )
        return receipt


def _candidate(engine: Engine, score: float | None) -> Candidate:
    report = engine.report
    return Candidate(
        instance_id=engine.instance_id,
        engine_name=engine.name,
        score=score,
        matched_tokens=0,
        match_is_exact=False,
        sequences=engine.sequences,
        queued_prefill_tokens=report.pending_prefill_tokens if report else 0,
        used_blocks=report.used_blocks if report else 0,
        total_blocks=engine.capacity.total_blocks,
    )
