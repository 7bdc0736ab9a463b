"""Memory and descriptors of a deployment's processes, and its books."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.soaking.judging import Books, Process
from catenary.client import AsyncClient
from catenary.v1 import router_pb2
from tests.support.http import call

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
        """What is in use, by the gateway's gauges and the router's account of the fleet; and how far the
        engines are: steps, tokens, cached tokens, beside the machine's load."""
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
    """Bytes of anonymous and shared memory, resident or in swap."""
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
    """The service's name, empty for a process that is started in another way."""
    with suppress(psutil.NoSuchProcess):
        found = _MODULE.search(" ".join(process.cmdline()))
        return found[1] if found else ""
    return ""
