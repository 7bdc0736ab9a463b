"""Measurements of a soak, and whether they show a leak."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from prometheus_client.parser import text_string_to_metric_families

from catenary.client import AsyncClient
from catenary.v1 import router_pb2
from tests.support.http import call

MIB = 1 << 20


class Limit(NamedTuple):
    """How much a process may grow: the larger of a share and of bytes."""

    share: float
    bytes: int

    def allows(self, before: float, after: float) -> bool:
        """Return whether the growth from `before` to `after` bytes is within the limit."""
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
        """Return the fields by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Growth:
    """One process between two moments; `what` says which two."""

    name: str
    what: str
    before: float
    after: float


def growth(settled: Sequence[Sample], last: Sequence[Sample]) -> list[Growth]:
    """Return how each process grew from the samples of a settled server to the last ones, each with a rest.

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
    """Return the median size of each process of each name, largest first."""
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
    """Return the faults, one line each; none for a server that does not grow.

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


# Gauges that say how much there is, not how much is in use.
_STANDING = ("catenary_serving_engines", "catenary_router_connected")
_MODULE = re.compile(r" -m (?:services\.)?([a-z.]+)")
_UP = "catenary_apps.cli.main"


class Meter:
    """Reads one deployment: `pid` is that of `catenary up`, `address` its gateway's base URL."""

    def __init__(self, pid: int, address: str, router: str, secret: str) -> None:
        self._root = psutil.Process(pid)
        self._address = address
        self._router = AsyncClient(router, secret=secret, timeout_s=10)

    async def close(self) -> None:
        """Hang up."""
        await self._router.aclose()

    def processes(self) -> dict[str, list[Process]]:
        """All processes of the deployment by the name of their service; what one has started itself is named
        after it and may be replaced."""
        found: dict[str, list[Process]] = {}
        for name, process, replaceable in _named(self._root):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                memory = process.memory_full_info()
                found.setdefault(name, []).append(
                    Process(
                        process.pid,
                        _own_memory(process.pid),
                        memory.rss,
                        memory.pss,
                        process.num_fds(),
                        process.num_threads(),
                        replaceable,
                    )
                )
        return found

    async def books(self) -> tuple[Books, dict[str, float]]:
        """Return what is in use, by the gateway's gauges and the router's account of the fleet; and how far
        the engines are: steps, tokens, cached tokens, beside the machine's load."""
        books = await self._gauges()
        fleet = await self._router.fleet()
        books["router: live sequences"] = fleet.live_sequences
        for lane in fleet.lanes:
            name = f"router: lane {lane.priority_class}"
            books[f"{name}, queued"] = lane.queued_sequences
            books[f"{name}, live"] = lane.live_sequences
        progress = {"load of the machine": os.getloadavg()[0]}
        for engine in fleet.engines:
            books |= _held(engine)
            for name in ("steps", "generated_tokens", "prompt_tokens", "cached_prompt_tokens", "preemptions"):
                progress[name] = progress.get(name, 0) + getattr(engine.load, name)
        return books, progress

    async def _gauges(self) -> dict[str, float]:
        answer = await call(self._address, "GET", "/metrics")
        families = text_string_to_metric_families(answer.body.decode())
        return {
            f"gateway: {sample.name} {' '.join(sample.labels.values())}".rstrip(): sample.value
            for family in families
            if family.type == "gauge" and family.name.startswith("catenary_")
            # When a counter was made is told as a gauge too.
            if family.name not in _STANDING and not family.name.endswith("_created")
            for sample in family.samples
        }


def _own_memory(pid: int) -> int:
    """Return bytes of anonymous and shared memory, resident or in swap."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise psutil.NoSuchProcess(pid) from error
    fields = dict(line.split(":", 1) for line in lines)
    return sum(1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem", "VmSwap"))


def _held(engine: router_pb2.FleetEngine) -> dict[str, float]:
    load, name = engine.load, engine.engine_name
    return {
        f"{name}: running": load.running,
        f"{name}: waiting": load.waiting,
        f"{name}: used blocks": load.used_blocks,
        f"{name}: pending prefill tokens": load.pending_prefill_tokens,
        f"{name}: placed sequences": engine.placed_sequences,
        f"{name}: placed tokens": engine.placed_tokens,
    }


def _named(root: psutil.Process) -> Iterator[tuple[str, psutil.Process, bool]]:
    yield "up", root, False
    for service in _children(root):
        name = _name(service)
        yield name, service, False
        for worker in service.children(recursive=True):
            own = _name(worker)
            yield (own, worker, False) if own else (f"{name} worker", worker, True)


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.children()
    return []


def _name(process: psutil.Process) -> str:
    """Return the service's name, empty for a process that is started in another way."""
    with suppress(psutil.NoSuchProcess):
        found = _MODULE.search(" ".join(process.cmdline()))
        return found[1] if found else ""
    return ""
