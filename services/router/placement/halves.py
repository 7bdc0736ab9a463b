"""Placement of sequences that two engines compute: one the prompt, another one what follows it."""

from __future__ import annotations

from collections.abc import Collection

from catenary.v1 import engine_pb2
from services.router.admission import Refused
from services.router.fleet import Engine
from services.router.placement.placer import Placed, Placer
from services.router.placement.request import Half, PlacementRequest

_PREFILL = engine_pb2.ENGINE_ROLE_PREFILL
_DECODE = engine_pb2.ENGINE_ROLE_DECODE
# Of Fleet.candidates: of any role.
_ANY = engine_pb2.ENGINE_ROLE_UNSPECIFIED


class HalvesPlacer:
    """Chooses what an engine computes of a sequence, and has a placer choose which; `request.placed` tells.

    A prompt is computed apart if more than `min_handover_tokens` of it are cached nowhere where it could go
    on, an engine for prompts has room, and so has one that takes their KV: else offers would pile up and
    expire. Where there are only engines for prompts, they compute all of a sequence.
    """

    def __init__(self, placer: Placer, *, min_handover_tokens: int) -> None:
        self.fleet = placer.fleet
        self._placer = placer
        self._min_tokens = min_handover_tokens

    def place(self, request: PlacementRequest, *, excluding: Collection[Engine] = ()) -> Placed:
        """As Placer.place, for the half that `request` is to be placed for if that can be had."""
        half = request.half
        if half is Half.REST or (half is Half.PROMPT and self._divides(request)):
            role = _DECODE if half is Half.REST else _PREFILL
            if (placed := self._try(request, half, role, excluding)) is not None:
                return placed
        request.placed = Half.WHOLE
        try:
            return self._placer.place(request, excluding=excluding)
        except Refused:
            if self.fleet.board(request.model).open_to(None, excluding).any():
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
        half: Half,
        role: engine_pb2.EngineRole.ValueType,
        excluding: Collection[Engine],
    ) -> Placed | None:
        """Place among the engines of a role; None if none of them can take it."""
        if not self.fleet.board(request.model).open_to(role, excluding).any():
            return None
        request.placed = half
        try:
            placed = self._placer.place(request, excluding=excluding, role=role)
        except Refused:
            return None
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
        # What an engine for prompts has cached is of use to no other sequence.
        return self._placer.uncached_tokens(request, among=board.open_to(None)) > self._min_tokens
