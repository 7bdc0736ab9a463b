"""From a request to an engine, or to the reason why there is none."""

from __future__ import annotations

from collections.abc import Collection

from catenary.v1 import common_pb2
from services.router.admission import Refused
from services.router.fleet import Engine, Fleet
from services.router.placement.policy import PlacementPolicy, PlacementRequest


class Placer:
    """Asks the policy among the engines that can take the request."""

    def __init__(self, fleet: Fleet, policy: PlacementPolicy, *, retry_after_ms: int) -> None:
        self._fleet = fleet
        self._policy = policy
        self._retry_after_ms = retry_after_ms

    def place(self, request: PlacementRequest, *, excluding: Collection[Engine] = ()) -> Engine:
        """Choose an engine other than those in `excluding`.

        Raises:
            Refused: MODEL_NOT_FOUND; UNAVAILABLE if none of its engines serves; OVERLOADED if all are full.
        """
        if not self._fleet.knows(request.model):
            raise Refused(
                common_pb2.ERROR_CODE_MODEL_NOT_FOUND, "The model does not exist here.", param="model"
            )
        serving = self._fleet.candidates(request.model, excluding=excluding)
        if not serving:
            raise Refused(
                common_pb2.ERROR_CODE_UNAVAILABLE,
                "No engine serves the model at the moment.",
                retryable=True,
                retry_after_ms=self._retry_after_ms,
            )
        roomy = [candidate for candidate in serving if candidate.has_room(request.sequences)]
        if request.beside in roomy:
            return request.beside
        engine = self._policy.pick(request, roomy)
        if engine is None:
            raise Refused(
                common_pb2.ERROR_CODE_OVERLOADED,
                "All engines of the model are full. Try again later.",
                retryable=True,
                retry_after_ms=self._retry_after_ms,
            )
        return engine
