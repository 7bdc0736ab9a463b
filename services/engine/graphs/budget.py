"""In which order buckets are captured, within a budget of memory that two phases share. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from services.engine.bucketing import Bucket
from services.engine.graphs.graphs import Key, Phase, size_of


class CaptureOrder(Enum):
    """MIN_TOKENS: least tokens first, so that a budget holds many graphs. MAX_BS: largest batch first, the
    one that is worth most. LARGEST_FIRST: what runs out of memory does so at once.
    """

    MIN_TOKENS = "min_tokens"
    MAX_BS = "max_bs"
    LARGEST_FIRST = "largest_first"


@dataclass(frozen=True, slots=True)
class Shape:
    """One static shape to capture; `size` is its padded tokens."""

    phase: Phase
    key: Key
    size: int


def shapes_in_order(
    phase: Phase, buckets: Iterable[Bucket], order: CaptureOrder, block_size: int
) -> list[Shape]:
    """The buckets of a phase as shapes, in the order of capture."""

    def tokens(bucket: Bucket) -> int:
        return size_of(phase, bucket, block_size)

    def length(bucket: Bucket) -> int:
        """Of a prefill row; of all of a decode's context."""
        return bucket.query + bucket.context_blocks * block_size

    keys: dict[CaptureOrder, Callable[[Bucket], tuple[int, ...]]] = {
        CaptureOrder.MIN_TOKENS: lambda bucket: (tokens(bucket), length(bucket), bucket.batch),
        CaptureOrder.MAX_BS: lambda bucket: (-bucket.batch, length(bucket)),
        CaptureOrder.LARGEST_FIRST: lambda bucket: (-tokens(bucket), -bucket.batch),
    }
    return [Shape(phase, bucket, tokens(bucket)) for bucket in sorted(buckets, key=keys[order])]


def count_shapes(phase: Phase, counts: Iterable[int]) -> list[Shape]:
    """Return the shapes that are numbers of rows or blocks, fewest first."""
    return [Shape(phase, count, count) for count in sorted(counts)]


def split_long(shapes: Sequence[Shape], max_tokens: int) -> tuple[list[Shape], list[Shape]]:
    """Return prefills that are captured, and those above the limit, which are bound by computation anyway.

    What counts is the tokens of the chunk's rows and of one row's context: batch * query + context.
    """
    kept: list[Shape] = []
    long: list[Shape] = []
    for shape in shapes:
        bucket = shape.key
        if not isinstance(bucket, Bucket):
            raise TypeError(f"{shape} is no prefill")
        context = shape.size // bucket.batch - bucket.query
        (kept if bucket.batch * bucket.query + context <= max_tokens else long).append(shape)
    return kept, long


@dataclass(slots=True)
class Purse:
    """A share of the memory in bytes. A capture is predicted by size from those of the same phase."""

    limit: int
    used: int = 0
    # Phase: bytes that its captures took, and their sizes.
    measured: dict[Phase, tuple[int, int]] = field(default_factory=dict)

    @property
    def remaining(self) -> int:
        """Bytes that are left."""
        return self.limit - self.used

    def predict(self, shape: Shape) -> int:
        """Expected bytes of a capture: size / sum of captured sizes * measured bytes; 0 before the first."""
        cost, size = self.measured.get(shape.phase, (0, 1))
        return shape.size * cost // size

    def allows(self, shape: Shape) -> bool:
        """Return whether a capture is expected to fit."""
        return self.predict(shape) < self.remaining

    def charge(self, shape: Shape, cost: int) -> None:
        """Note what a capture took."""
        before, size = self.measured.get(shape.phase, (0, 0))
        self.measured[shape.phase] = before + cost, size + shape.size
        self.used += cost


class CaptureSchedule:
    """Hands out shapes one by one; each is answered with `captured` or `failed` before the next.

    First the prefills within `prompt_ratio` of the budget, then heads and decodes within the rest. What a
    phase leaves is then lent to the other for what did not fit: decode's to prefill, and all that is left to
    decode. A failure (no memory) rules out all shapes of the phase that are as large. `budget` None: no
    limit.
    """

    def __init__(
        self, prefill: Iterable[Shape], rest: Iterable[Shape], *, budget: int | None, prompt_ratio: float
    ) -> None:
        share = None if budget is None else int(budget * prompt_ratio)
        self._purses = {
            True: None if share is None else Purse(share),
            False: None if budget is None or share is None else Purse(budget - share),
        }
        self._queue = deque([*prefill, *rest])
        self._skipped: list[Shape] = []
        # Rounds of lending that are still to come: who gets the other's leftover.
        self._loans = deque([True, False])
        self._too_large: dict[Phase, int] = {}
        self.out_of_memory: list[Shape] = []
        self.total = len(self._queue)

    def next(self) -> Shape | None:
        """The next shape to capture, None when nothing more fits."""
        while True:
            while self._queue:
                shape = self._queue.popleft()
                if shape.size >= self._too_large.get(shape.phase, shape.size + 1):
                    self.out_of_memory.append(shape)
                    continue
                purse = self._purse(shape)
                if purse is None or purse.allows(shape):
                    return shape
                self._skipped.append(shape)
            if not self._loans or not self._skipped:
                return None
            self._lend(self._loans.popleft())

    def captured(self, shape: Shape, cost: int) -> None:
        """A capture succeeded and holds `cost` bytes."""
        purse = self._purse(shape)
        if purse is not None:
            purse.charge(shape, cost)

    def failed(self, shape: Shape) -> None:
        """The device had no memory for a capture."""
        self.out_of_memory.append(shape)
        smallest = self._too_large.get(shape.phase, shape.size)
        self._too_large[shape.phase] = min(smallest, shape.size)

    @property
    def over_budget(self) -> tuple[Shape, ...]:
        """Shapes that did not fit, once `next` returned None."""
        return tuple(self._skipped)

    def missing_bytes(self) -> int:
        """Return predicted bytes of the shapes over budget."""
        purses = ((shape, self._purse(shape)) for shape in self._skipped)
        return sum(purse.predict(shape) for shape, purse in purses if purse is not None)

    def _purse(self, shape: Shape) -> Purse | None:
        return self._purses[shape.phase is Phase.PREFILL]

    def _lend(self, to_prefill: bool) -> None:
        taker, giver = self._purses[to_prefill], self._purses[not to_prefill]
        if taker is None or giver is None:
            return
        left = max(0, giver.remaining)
        giver.limit -= left
        taker.limit += left
        waiting = [shape for shape in self._skipped if (shape.phase is Phase.PREFILL) is to_prefill]
        self._skipped = [shape for shape in self._skipped if shape not in waiting]
        self._queue.extend(waiting)
