"""The placer: candidates for a request, the policy's choice among them, and its receipt."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from catenary.telemetry import get_logger
from catenary.v1 import common_pb2, engine_pb2, router_pb2
from services.router.admission import Refused, not_served
from services.router.fleet import Engine, EngineColumns, Fleet, has_room
from services.router.index import KvIndex
from services.router.placement.policy import (
    Candidates,
    Choice,
    Floats,
    Mask,
    Memory,
    PlacementPolicy,
    PlacementRequest,
    Prefixes,
    Rows,
    SplitPart,
)

# Candidates that a receipt lists.
MAX_LISTED = 16
_PARTS = {
    SplitPart.WHOLE: router_pb2.ROUTE_HALF_WHOLE,
    SplitPart.PROMPT: router_pb2.ROUTE_HALF_PROMPT,
    SplitPart.REST: router_pb2.ROUTE_HALF_REST,
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
    """Several engines as they were, made into candidates when a receipt is asked for, which is rare."""

    engines: list[tuple[str, str, engine_pb2.LoadReport | None, engine_pb2.Capacity]]
    scores: list[float] | None
    matched: tuple[list[int], list[bool]] | None
    sequences: list[float]
    prefill: list[float]

    def candidate(self, number: int) -> Candidate:
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
    part: SplitPart

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Best first, at most MAX_LISTED of the `considered` ones."""
        return tuple(map(self.listed.candidate, range(len(self.listed.engines))))

    def message(self) -> router_pb2.RouteReceipt:
        """Return the message for Explain."""
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
            half=_PARTS[self.part],
        )

    def attributes(self) -> dict[str, str | int | list[str] | list[int] | list[float]]:
        """Return the attributes of the span."""
        candidates = self.candidates
        told: dict[str, str | int | list[str] | list[int] | list[float]] = {
            "catenary.sequence_id": self.request_id,
            "gen_ai.request.model": self.model,
            "catenary.route.policy": self.policy,
            "catenary.route.reason": self.reason,
            "catenary.route.half": self.part.name.lower(),
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
        """Return the fields of a line of the log."""
        return {
            "sequence": self.request_id,
            "policy": self.policy,
            "reason": self.reason,
            "half": self.part.name.lower(),
            "considered": self.considered,
            "prompt_tokens": self.prompt_tokens,
            "matched_tokens": self.matched_tokens,
            "placement": self.placement,
            "decision_us": self.decision_us,
        }


def listed(candidates: Candidates, choice: Choice) -> Listed:
    """Return the candidates that a receipt lists: the best by score, and the chosen one in any case."""
    if choice.scores is None:
        return _chosen_alone(candidates, choice.position)
    best = _best(choice.scores)
    if choice.position not in best:
        best[-1] = choice.position
    looked, columns, rows = candidates.looked, candidates.columns, candidates.rows[best]
    engines = [columns.engines[row] for row in rows.tolist()]
    return Listed(
        engines=[(engine.instance_id, engine.name, engine.report, engine.capacity) for engine in engines],
        scores=choice.scores[best].tolist(),
        matched=None if looked is None else (looked.tokens[best].tolist(), looked.exact[best].tolist()),
        sequences=columns.sequences[rows].tolist(),
        prefill=columns.prefill[rows].tolist(),
    )


def _chosen_alone(candidates: Candidates, position: int) -> Listed:
    looked, columns, engine = candidates.looked, candidates.columns, candidates.engine(position)
    matched = None if looked is None else ([int(looked.tokens[position])], [bool(looked.exact[position])])
    return Listed(
        engines=[(engine.instance_id, engine.name, engine.report, engine.capacity)],
        scores=None,
        matched=matched,
        sequences=[float(columns.sequences[engine.row])],
        prefill=[float(columns.prefill[engine.row])],
    )


def _best(scores: Floats) -> Rows:
    """Return the positions of the lowest scores, lowest first."""
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
        """Return receipts of one request, or of all with None: newest first, at most `limit`."""
        found = (
            receipt
            for receipt in reversed(self._receipts)
            if request_id is None or receipt.request_id == request_id
        )
        return list(islice(found, limit))


_log = get_logger(__name__)
_level = logging.getLogger(__name__)
_FIRST_ROW = np.zeros(1, dtype=np.intp)


@dataclass(frozen=True, slots=True)
class Placed:
    """The engine of a sequence, and the receipt."""

    engine: Engine
    receipt: Receipt


class Placer:
    """Asks a model's policy among the engines that can take the request.

    `policies`: those of models that have another one than `policy`. `clock`: seconds, the one by which the
    fleet is told of messages. `wall_clock`: Unix time in seconds, for receipts. Without `prefixes` nothing is
    known of caches.
    """

    def __init__(
        self,
        fleet: Fleet,
        policy: PlacementPolicy,
        *,
        retry_after_ms: int,
        prefixes: Prefixes | None = None,
        receipts: ReceiptBook | None = None,
        policies: Mapping[str, PlacementPolicy] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.fleet = fleet
        self._policy = policy
        self._policies = policies or {}
        self._retry_after_ms = retry_after_ms
        self._prefixes = Prefixes(KvIndex(1), max_remembered=1) if prefixes is None else prefixes
        self._receipts = ReceiptBook(1) if receipts is None else receipts
        self._clock = clock
        self._wall_clock = wall_clock

    def place(
        self,
        request: PlacementRequest,
        *,
        excluding: Collection[Engine] = (),
        role: engine_pb2.EngineRole.ValueType | None = None,
    ) -> Placed:
        """Choose an engine other than those in `excluding`; `role`: as for Fleet.candidates.

        Raises:
            Refused: MODEL_NOT_FOUND; UNAVAILABLE if none of its engines serves; OVERLOADED if all are full.
        """
        began = self._clock()
        candidates = self._candidates(request, excluding, role, began)
        policy = self._policies.get(request.model, self._policy)
        choice = Choice(0, "same_prompt") if candidates.same_prompt else policy.pick(request, candidates)
        engine = candidates.engine(choice.position)
        looked = candidates.looked
        matched = 0 if looked is None else int(looked.tokens[choice.position])
        request.placements += 1
        # The rest of a prompt that is there already is less than a block.
        most = engine.capacity.block_size if candidates.same_prompt else len(request.token_ids)
        request.uncached_tokens = min(most, len(request.token_ids) - matched)
        if policy.memory is Memory.ALL or (
            policy.memory is Memory.UNTOLD and not self._prefixes.tells(engine)
        ):
            self._prefixes.sent(request, engine)
        receipt = Receipt(
            request_id=request.request_id,
            model=request.model,
            policy=policy.name,
            time_ms=int(self._wall_clock() * 1000),
            prompt_tokens=len(request.token_ids),
            listed=listed(candidates, choice),
            considered=len(candidates),
            chosen=engine.instance_id,
            lease_epoch=engine.epoch,
            reason="alone" if request.quarantined else choice.reason,
            queued_ms=request.queued_ms,
            decision_us=max(0, int((self._clock() - began) * 1e6)),
            placement=request.placements,
            matched_tokens=matched,
            part=request.placed_part,
        )
        self._receipts.add(receipt)
        if _level.isEnabledFor(logging.DEBUG):
            _log.debug("sequence placed", engine=engine.name, **receipt.summary())
        return Placed(engine, receipt)

    def uncached_tokens(self, request: PlacementRequest, *, among: Mask | None = None) -> int:
        """Tokens of the request that the engine which has most of them cached would still compute. `among`:
        of which rows of the model's columns; None: of all."""
        columns = self.fleet.columns(request.model)
        cached = self._prefixes.best(request, columns).tokens
        return len(request.token_ids) - int((cached if among is None else cached[among]).max(initial=0))

    def forget(self, engine: Engine) -> None:
        """Forget an engine that left."""
        self._prefixes.forget(engine)

    def _candidates(
        self,
        request: PlacementRequest,
        excluding: Collection[Engine],
        role: engine_pb2.EngineRole.ValueType | None,
        now: float,
    ) -> Candidates:
        if not self.fleet.knows(request.model):
            raise Refused(
                common_pb2.ERROR_CODE_MODEL_NOT_FOUND, "The model does not exist here.", param="model"
            )
        columns = self.fleet.columns(request.model)
        if len(columns) == 1 and not excluding and self._can_take(request, columns.engines[0], role):
            same_prompt = (
                request.prompt_engine is not None and columns.row_of(request.prompt_engine.epoch) is not None
            )
            return Candidates(columns, _FIRST_ROW, request, self._prefixes, now, same_prompt=same_prompt)
        serving = columns.open_to(role, excluding)
        if not serving.any():
            raise not_served(self._retry_after_ms)
        free = serving & columns.free_for(request)
        if (row := _row_of_same_prompt(request, columns, free)) is not None:
            return Candidates(columns, np.array([row]), request, self._prefixes, now, same_prompt=True)
        (rows,) = self._roomy(request, columns, free).nonzero()
        if not len(rows):
            raise Refused(
                common_pb2.ERROR_CODE_OVERLOADED,
                "All engines of the model are full. Try again later.",
                retryable=True,
                retry_after_ms=self._retry_after_ms,
            )
        return Candidates(columns, rows, request, self._prefixes, now)

    def _can_take(
        self, request: PlacementRequest, engine: Engine, role: engine_pb2.EngineRole.ValueType | None
    ) -> bool:
        """Whether the only engine of a model can plainly take a request; if not, columns say why."""
        if (
            request.quarantined
            or engine.reserved_for is not None
            or not engine.available
            or not engine.does(role)
        ):
            return False
        return has_room(engine, request.sequences, request.kv_tokens)

    def _roomy(self, request: PlacementRequest, columns: EngineColumns, free: Mask) -> Mask:
        roomy: Mask
        if request.quarantined:
            roomy = free & (columns.sequences == 0) & (columns.room > 0)
            return roomy
        needed = request.kv_tokens
        roomy = free & columns.roomy(request.sequences, needed)
        if needed and not roomy.any():
            # Blocks that an engine has cached need no room there.
            cached = self._prefixes.told(request, columns).tokens
            holders = free & (cached > 0)
            roomy = holders & columns.roomy(request.sequences, np.maximum(1.0, needed - cached))
        return roomy


def _row_of_same_prompt(request: PlacementRequest, columns: EngineColumns, free: Mask) -> int | None:
    """Return the row of the engine that has the prompt, if it can take the request, too."""
    row = None if request.prompt_engine is None else columns.row_of(request.prompt_engine.epoch)
    if row is None or not (free & columns.roomy(request.sequences, min(1, request.kv_tokens)))[row]:
        return None
    return row


_PREFILL = engine_pb2.ENGINE_ROLE_PREFILL
_DECODE = engine_pb2.ENGINE_ROLE_DECODE
# Of Fleet.candidates: of any role.
_ANY = engine_pb2.ENGINE_ROLE_UNSPECIFIED


class SplitPlacer:
    """Splits sequences between prefill and decode engines, each chosen by a placer.

    A prompt is computed apart if more than `min_handover_tokens` of it are cached on no engine that could
    decode it, a prefill engine has room, and so has a decode engine: else offers would pile up and expire.
    Where a model has prefill engines alone, they compute whole sequences. `request.placed_part` tells the
    part that the chosen engine computes.
    """

    def __init__(self, placer: Placer, *, min_handover_tokens: int) -> None:
        self.fleet = placer.fleet
        self._placer = placer
        self._min_tokens = min_handover_tokens

    def place(self, request: PlacementRequest, *, excluding: Collection[Engine] = ()) -> Placed:
        """Choose an engine for `request.part` if one can take it, else for all of it. Raises Refused."""
        part = request.part
        if part is SplitPart.REST or (part is SplitPart.PROMPT and self._splits(request)):
            role = _DECODE if part is SplitPart.REST else _PREFILL
            if (placed := self._try(request, part, role, excluding)) is not None:
                return placed
        request.placed_part = SplitPart.WHOLE
        try:
            return self._placer.place(request, excluding=excluding)
        except Refused:
            if self.fleet.columns(request.model).open_to(None, excluding).any():
                raise
        return self._placer.place(request, excluding=excluding, role=_ANY)

    def uncached_tokens(self, request: PlacementRequest) -> int:
        """See Placer."""
        return self._placer.uncached_tokens(request)

    def forget(self, engine: Engine) -> None:
        """See Placer."""
        self._placer.forget(engine)

    def _try(
        self,
        request: PlacementRequest,
        part: SplitPart,
        role: engine_pb2.EngineRole.ValueType,
        excluding: Collection[Engine],
    ) -> Placed | None:
        """Place among the engines of a role; None if none of them can take it."""
        if not self.fleet.columns(request.model).open_to(role, excluding).any():
            return None
        request.placed_part = part
        try:
            placed = self._placer.place(request, excluding=excluding, role=role)
        except Refused:
            return None
        if part is SplitPart.REST:
            # Of the prompt, only the logits of the last token are computed.
            request.uncached_tokens = 1
        return placed

    def _splits(self, request: PlacementRequest) -> bool:
        if len(request.token_ids) <= self._min_tokens:
            return False
        columns = self.fleet.columns(request.model)
        if not (columns.open_to(_DECODE) & columns.roomy(request.sequences)).any():
            return False
        # The cache of a prefill engine is of use to no decode engine.
        return self._placer.uncached_tokens(request, among=columns.open_to(None)) > self._min_tokens


AnyPlacer = Placer | SplitPlacer
