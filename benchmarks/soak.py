"""What a server holds after an hour of clients of every kind: memory, descriptors, KV blocks, queues.

Run: `python -m benchmarks.soak --minutes 30`. `catenary up` serves the built-in model (`--scripted`: an
engine without a model) with small caches. Normal, hostile, slow and cancelling clients ask it for so long,
beside one well-behaved stream whose gaps are measured. Twice all clients rest: when the caches are full
(`--settle-minutes`) and at the end. Then all books must be zero, and between the two no process may have
grown by more than 3 % or 16 MiB, whichever is more; nor may it have, as a median of minutes, under load.
Memory is what no file is behind: anonymous and shared.
The exit status is 1 if anything of that is not so, or if a client got an answer that no sound server gives.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import PeerError, machine, table
from benchmarks.peers.server import Server, free_ports, interrupted_by_signals
from benchmarks.peers.subjects import Subject
from benchmarks.soaking import (
    Client,
    Counts,
    Meter,
    Neighbour,
    Sample,
    cancelling,
    faults,
    growth,
    hostile,
    normal,
    slow,
)

MODEL = "smollm2"
MIB = 1 << 20
CLIENTS: dict[str, tuple[Client, int]] = {
    "normal": (normal, 4),
    "hostile": (hostile, 2),
    "slow": (slow, 4),
    "cancelling": (cancelling, 3),
}
# Limits that are reached within the minutes that it takes to settle, and by slow clients.
LIMITS = {
    "CATENARY_ENGINE_KV_CACHE_GIB": "0.25",
    "CATENARY_ENGINE_GRAMMAR_CACHE": "16",
    "CATENARY_TOKENIZER_CONSTRAINT_CACHE": "64",
    "CATENARY_GATEWAY_MAX_STORED_RESPONSES": "50",
    "CATENARY_GATEWAY_HEADER_TIMEOUT_S": "8",
    "CATENARY_GATEWAY_BODY_TIMEOUT_S": "8",
    "CATENARY_ENGINE_MAX_NUM_SEQS": "16",
}
SCRIPT = {
    "model": {"vocab_size": 49152, "max_model_len": 2048, "temperature": 1.0},
    "capacity": {"total_blocks": 700, "max_running": 16, "prefix_caching": True},
    "latency": {"step_base_ms": 10},
}
# How long running work may take to end once all clients have gone.
REST_S = 90.0


class Soak:
    """One run: clients, samples."""

    def __init__(self, meter: Meter, address: str, model: str, seed: int, every_s: float) -> None:
        self.counts = Counts()
        self.samples: list[Sample] = []
        self.neighbour = Neighbour(self.counts, address, model)
        self._meter = meter
        self._address = address
        self._model = model
        self._seed = seed
        self._every_s = every_s
        self._began = time.monotonic()

    async def load(self, seconds: float) -> list[Sample]:
        """All clients for so long, then the rest. Returns the samples of the last minute, and of the rest."""
        end = time.monotonic() + seconds
        turns = [
            self._keep(client, end, kind, number)
            for kind, (client, n) in CLIENTS.items()
            for number in range(n)
        ]
        tasks = [asyncio.create_task(turn) for turn in (*turns, self._keep_neighbour(end))]
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(self._every_s, left))
            await self._sample(rest=False)
        await asyncio.gather(*tasks)
        rest = await self._rest()
        loaded = [one for one in self.samples if not one.rest and one.at_s >= end - self._began - 60]
        return [*loaded, rest]

    async def _keep(self, client: Client, end: float, kind: str, number: int) -> None:
        rng = random.Random(f"{self._seed} {kind} {number} {end}")

        async def turn() -> None:
            await client(self.counts, self._address, self._model, rng)

        await self._repeat(kind, turn, end)

    async def _keep_neighbour(self, end: float) -> None:
        await self._repeat("neighbour", self.neighbour.turn, end)

    async def _repeat(self, kind: str, turn: Callable[[], Awaitable[None]], end: float) -> None:
        while time.monotonic() < end:
            try:
                await turn()
            except TimeoutError:
                self.counts.fault(kind, "no answer", "the client's patience ended")
            except (OSError, EOFError) as error:
                if kind not in ("slow", "cancelling"):
                    self.counts.fault(kind, "broken", repr(error))
                else:
                    self.counts.add(kind, "broken")
                await asyncio.sleep(0.1)

    async def _rest(self) -> Sample:
        """Wait until the books are zero; what they say after REST_S is what they say."""
        end = time.monotonic() + REST_S
        while True:
            await asyncio.sleep(1)
            sample = await self._sample(rest=True, show=False)
            if not any(sample.books.values()) or time.monotonic() > end:
                break
            held = ", ".join(f"{name} {value:g}" for name, value in sample.books.items() if value)
            print(f"{sample.at_s:6.0f} s: still {held}", flush=True)
        # Connections that are closing, workers that are being replaced.
        await asyncio.sleep(5)
        return await self._sample(rest=True)

    async def _sample(self, *, rest: bool, show: bool = True) -> Sample:
        books, progress = await self._meter.books()
        gap = self.neighbour.longest_since()
        at_s = time.monotonic() - self._began
        # Reading the pages of a large process takes long enough to disturb the neighbour's clock.
        processes = await asyncio.to_thread(self._meter.processes)
        sample = Sample(at_s, rest, processes, books, 1e3 * gap if gap else None, progress)
        self.samples.append(sample)
        if show:
            print(_line(sample, self.counts), flush=True)
        return sample


def _line(sample: Sample, counts: Counts) -> str:
    sizes = ", ".join(
        f"{name} {sum(one.own for one in processes) / MIB:.0f}"
        for name, processes in sample.processes.items()
    )
    descriptors = sum(one.descriptors for processes in sample.processes.values() for one in processes)
    used = {name.split(": ")[1]: value for name, value in sample.books.items() if name.startswith("engine")}
    asked = sum(sum(outcomes.values()) for outcomes in counts.answers.values())
    gap = "" if sample.gap_ms is None else f", longest gap {sample.gap_ms:.0f} ms"
    return (
        f"{sample.at_s:6.0f} s{' at rest' if sample.rest else ''}: {asked} requests, "
        f"{sum(counts.unexpected.values())} faults; MiB: {sizes}; {descriptors} descriptors; "
        f"running {used.get('running', 0):g}, waiting {used.get('waiting', 0):g}, "
        f"blocks {used.get('used blocks', 0):g}{gap}; load {sample.progress['load of the machine']:.0f}"
    )


def _subject(options: argparse.Namespace, directory: Path, ports: Sequence[int], secret: str) -> Subject:
    environment = {
        **LIMITS,
        "CATENARY_CLIENT_SECRET": secret,
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
    }
    if options.scripted:
        script = directory / "script.json"
        script.write_text(json.dumps(SCRIPT), encoding="utf-8")
        environment["CATENARY_ENGINE_SCRIPT"] = str(script)
    command = [sys.executable, "-m", "catenary_apps.cli.main", "up", "--model", f"soak={options.model}"]
    command += ["--max-model-len", "2048", "--port", str(ports[0]), "--router-port", str(ports[1])]
    command += ["--tokenizer-port", "0", "--drain-s", "5"]
    command += ["--state-dir", str(directory / "state"), "--log-dir", str(directory / "logs")]
    return Subject("catenary up", "", command, environment, "soak", sleeps=False)


async def soak(options: argparse.Namespace, server: Server, router: str, secret: str) -> int:
    """Load it, print and keep the figures; the exit status."""
    meter = Meter(server.pid, server.url, router, secret)
    run = Soak(meter, server.url, "soak", options.seed, options.every_s)
    settle_s = 60 * options.settle_minutes
    try:
        settled = await run.load(settle_s)
        last = await run.load(max(60.0, 60 * options.minutes - settle_s))
    finally:
        if options.output:
            _write(options.output, options, run, None)
        await meter.close()
    wrong = faults(settled, last) + [f"{count} x {line}" for line, count in run.counts.unexpected.items()]
    _report(run, settled, last, wrong)
    if options.output:
        _write(options.output, options, run, wrong)
    return 1 if wrong else 0


def _report(run: Soak, settled: list[Sample], last: list[Sample], wrong: list[str]) -> None:
    rows = [["process", "compared", "settled, MiB", "end, MiB", "growth, MiB"]]
    for one in growth(settled, last):
        sizes = (one.before / MIB, one.after / MIB, (one.after - one.before) / MIB)
        rows.append([one.name, one.what, *(f"{size:.1f}" for size in sizes)])
    print("\n" + "\n".join(table(rows)))
    for kind, outcomes in run.counts.answers.items():
        print(f"{kind}: " + ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    gaps = sorted(run.neighbour.gaps)
    if gaps:
        shown = (_quantile(gaps, 0.5), _quantile(gaps, 0.99), gaps[-1])
        print(
            "neighbour's gaps, ms: median {:.0f}, p99 {:.0f}, longest {:.0f}".format(
                *(1e3 * g for g in shown)
            )
        )
        print(
            f"neighbour's streams: {run.neighbour.texts.total()}, different texts: {len(run.neighbour.texts)}"
        )
    print("\n".join(f"FAULT: {line}" for line in wrong) or "no growth, all books zero")


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def _write(file: Path, options: argparse.Namespace, run: Soak, wrong: list[str] | None) -> None:
    """Keep all samples; `faults` is null for a run that was broken off."""
    gaps = sorted(run.neighbour.gaps)
    document: dict[str, Any] = {
        "machine": machine(),
        "options": {name: str(value) for name, value in vars(options).items()},
        "faults": wrong,
        "answers": run.counts.answers,
        "gaps_ms": {str(share): 1e3 * _quantile(gaps, share) for share in (0.5, 0.9, 0.99, 1.0)}
        if gaps
        else {},
        "samples": [sample.as_json() for sample in run.samples],
    }
    file.write_text(json.dumps(document), encoding="utf-8")


def main() -> int:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="of load, in all")
    parser.add_argument("--settle-minutes", type=float, default=5, help="of them before the first rest")
    parser.add_argument("--every-s", type=float, default=5, help="between two samples")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--scripted", action="store_true", help="an engine without a model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file for all samples")
    options = parser.parse_args()
    ports, secret = free_ports(2), secrets.token_urlsafe(32)
    with tempfile.TemporaryDirectory(prefix="cat-soak-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        subject = _subject(options, directory, ports, secret)
        log = Path(tempfile.gettempdir()) / f"soak-{os.getpid()}.log"
        server = Server(subject, f"http://127.0.0.1:{ports[0]}", log)
        print(f"starting catenary up (log: {log})", flush=True)
        with interrupted_by_signals():
            try:
                print(f"first answer after {server.start(300):.1f} s", flush=True)
                return asyncio.run(soak(options, server, f"127.0.0.1:{ports[1]}", secret))
            except PeerError as error:
                print(error)
                return 1
            finally:
                server.stop()


if __name__ == "__main__":
    sys.exit(main())
