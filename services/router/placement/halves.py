"""Placement of sequences that two engines compute: one the prompt, another one what follows it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from catenary.v1 import engine_pb2
from services.router.admission import Refused
from services.router.fleet import Engine, Fleet
from services.router.placement.placer import Placed, Placer
from services.router.placement.policy import PlacementPolicy
from services.router.placement.request import Half, PlacementRequest

_PREFILL = engine_pb2.ENGINE_ROLE_PREFILL
_DECODE = engine_pb2.ENGINE_ROLE_DECODE
# Of Fleet.candidates: whoever there is.
_ANY = engine_pb2.ENGINE_ROLE_UNSPECIFIED


class HalvesPlacer(Placer):
    """Chooses what an engine computes of a sequence, and then as any placer which; `request.placed` tells.

    A prompt is computed apart if more than `min_handover_tokens` of it are cached nowhere where it could go
    on, an engine for prompts has room, and so has one that takes their KV: else offers would pile up and
    expire. Where there are only engines for prompts, they compute all of a sequence.
    """

    def __init__(
        self, fleet: Fleet, policy: PlacementPolicy, *, min_handover_tokens: int, **others: Any
    ) -> None:
        super().__init__(fleet, policy, **others)
        self._min_tokens = min_handover_tokens

    def place(self, request: PlacementRequest, *, excluding: Collection[Engine] = ()) -> Placed:
        """See Placer."""
        half = request.half
        if half is Half.REST or (half is Half.PROMPT and self._divides(request)):
            role = _DECODE if half is Half.REST else _PREFILL
            if (placed := self._try(request, half, role, excluding)) is not None:
                return placed
        request.placed, request.role = Half.WHOLE, None
        try:
            return super().place(request, excluding=excluding)
        except Refused:
            if self.fleet.board(request.model).open_to(None, excluding).any():
                raise
        request.role = _ANY
        try:
            return super().place(request, excluding=excluding)
        finally:
            request.role = None

    def _try(
        self,
        request: PlacementRequest,
        half: Half,
        role: engine_pb2.EngineRole.ValueType,
        excluding: Collection[Engine],
    ) -> Placed | None:
        """Place among the engines of a role; None if none of them can take it."""
        if not self.fleet.board(request.model).open_to(role, excluding).any():
            return None
        request.role = role
        try:
            placed = super().place(request, excluding=excluding)
        except Refused:
            return None
        finally:
            request.role = None
        request.placed = half
        if half is Half.REST:
            # The last token's logits are what is wanted of the prompt.
            request.uncached_tokens = 1
        return placed

    def _divides(self, request: PlacementRequest) -> bool:
        if len(request.token_ids) <= self._min_tokens:
            return False
        board = self.fleet.board(request.model)
        if not (board.open_to(_DECODE) & board.roomy(request.sequences)).any():
            return False
        # What an engine for prompts has cached is of use to nobody else.
        cached = self._prefixes.best(request, board).tokens[board.open_to(None)].max(initial=0)
        return len(request.token_ids) - int(cached) > self._min_tokens
