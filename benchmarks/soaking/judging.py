"""What a soak measured, and whether it shows a leak."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

MIB = 1 << 20


class Limit(NamedTuple):
    """How much a process may grow: the larger of a share and of bytes."""

    share: float
    bytes: int

    def allows(self, before: float, after: float) -> bool:
        """Whether the growth from `before` to `after` bytes is within the limit."""
        return after - before <= max(self.share * before, self.bytes)


GROWTH = Limit(0.03, 16 * MIB)

Books = Mapping[str, float]
"""What is in use now, by name: sequences, KV blocks, queues, gauges. At rest each of them is zero."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process at one moment; sizes in bytes. `replaceable`: a worker that its service may replace.

    `own`: memory that no file is behind, in swap too. This is judged: pages of files, of which the rest of
    `rss` and `pss` consists, are the kernel's to take and give back, as other programs need memory.
    """

    pid: int
    own: int
    rss: int
    pss: int
    descriptors: int
    threads: int
    replaceable: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """Everything at one moment, in seconds since the load began. `rest`: no client runs.

    `processes` has those of one name together; `gap_ms`: the longest gap of the neighbour's tokens since the
    sample before, None without one.
    """

    at_s: float
    rest: bool
    processes: Mapping[str, Sequence[Process]]
    books: Books
    gap_ms: float | None = None
    progress: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Growth:
    """One process between two moments; `what` says which two."""

    name: str
    what: str
    before: float
    after: float


def growth(settled: Sequence[Sample], last: Sequence[Sample]) -> list[Growth]:
    """How each process grew from the samples of a settled server to the last ones, each with a rest.

    Compared are the medians under load, and what is left at rest. Of several processes with one name the
    largest is compared with the largest, and so on, since workers are replaced.
    """
    found: list[Growth] = []
    for what, rest in (("under load", False), ("at rest", True)):
        before = _sizes([one for one in settled if one.rest is rest])
        after = _sizes([one for one in last if one.rest is rest])
        for name, sizes in after.items():
            pairs = zip(before.get(name, ()), sizes, strict=False)
            found += [Growth(name, what, small, large) for small, large in pairs]
    return found


def _sizes(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """The median size of each process of each name, largest first."""
    series: dict[str, list[list[float]]] = {}
    for sample in samples:
        for name, processes in sample.processes.items():
            ranks = series.setdefault(name, [])
            for rank, size in enumerate(sorted((float(one.own) for one in processes), reverse=True)):
                if rank == len(ranks):
                    ranks.append([])
                ranks[rank].append(size)
    return {name: [statistics.median(sizes) for sizes in ranks] for name, ranks in series.items()}


def faults(settled: Sequence[Sample], last: Sequence[Sample], limit: Limit = GROWTH) -> list[str]:
    """What is wrong, one line each; nothing for a server that keeps what it has.

    `settled`: samples under load and at rest of when the caches were full; `last`: those of the end.
    """
    rests = [one for one in settled if one.rest], [one for one in last if one.rest]
    if not all(rests):
        return ["no sample at rest: the books were never compared"]
    first, end = rests[0][-1], rests[1][-1]
    lines = [
        f"{one.name} grew {one.what} from {one.before / MIB:.1f} to {one.after / MIB:.1f} MiB"
        for one in growth(settled, last)
        if not limit.allows(one.before, one.after)
    ]
    for when, sample in (("after settling", first), ("at the end", end)):
        lines += [f"{name} is {value:g} at rest {when}" for name, value in sample.books.items() if value]
    lines += [f"{name} is no longer told" for name in sorted(first.books.keys() - end.books.keys())]
    for name, processes in first.processes.items():
        lines += _changed(name, processes, end.processes.get(name, ()))
    return lines


def _changed(name: str, before: Sequence[Process], after: Sequence[Process]) -> list[str]:
    lines = []
    stay = {one.pid for one in before if not one.replaceable}
    if gone := stay - {one.pid for one in after}:
        lines.append(f"{name} ended: process {', '.join(map(str, sorted(gone)))}")
    if len(after) != len(before):
        lines.append(f"{name}: {len(after)} processes where there were {len(before)}")
    opened, left = (sum(one.descriptors for one in processes) for processes in (before, after))
    if left > opened:
        lines.append(f"{name} has {left} descriptors open at rest where it had {opened}")
    return lines
