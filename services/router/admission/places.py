"""Places on a model's engines, and those that each class keeps from the classes below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.router.admission.lane import LANES


@dataclass(slots=True)
class ClassLoad:
    """Sequences that engines have, by the class that they came with. Kept by LoadGuard alone."""

    placed: list[int] = field(default_factory=lambda: [0 for _ in LANES])


class Places:
    """The classes that may take one more place.

    Of `total` places, class c keeps floor(share_c * total) from the classes below it: a lower class leaves
    free what higher ones keep and do not use. `foreign` places are taken by others than this router. A total
    of 0 says that none is known, and no class is held back then.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = tuple(shares)
        self.load = ClassLoad()
        self.total = 0
        self.foreign = 0
        self._kept = [0 for _ in LANES]

    def update(self, total: int, foreign: int) -> None:
        """Take over what the engines have now."""
        if total != self.total:
            self._kept = [int(share * total) for share in self._shares] + [0] * (
                len(LANES) - len(self._shares)
            )
        self.total, self.foreign = total, foreign

    def kept(self, lane: int) -> int:
        """Places that a class keeps from lower ones."""
        return self._kept[lane]

    def admits(self, lane: int, sequences: int) -> bool:
        """Whether a class leaves enough to the higher ones if it takes so many places more."""
        if not self.total or not any(self._kept[:lane]):
            return True
        placed = self.load.placed
        idle = sum(max(0, self._kept[each] - placed[each]) for each in range(lane))
        # More than it could ever get: then all that it can get.
        wanted = min(sequences, max(1, self.total - sum(self._kept[:lane])))
        return self.total - self.foreign - sum(placed) - wanted >= idle
