"""One rank's share of a model that several ranks compute together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.engine.model.errors import ModelError


def _alone(partial: torch.Tensor) -> torch.Tensor:
    return partial


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `world`. reduce: the sum of a tensor over all ranks; with one rank the tensor itself."""

    rank: int = 0
    world: int = 1
    reduce: Callable[[torch.Tensor], torch.Tensor] = _alone

    def split(self, size: int, what: str) -> tuple[int, int]:
        """This rank's (start, length) of a dimension that the ranks share. Raises ModelError if uneven."""
        if size % self.world:
            raise ModelError(f"{what} ({size}) cannot be split over {self.world} ranks")
        length = size // self.world
        return self.rank * length, length


ALONE = Shard()
