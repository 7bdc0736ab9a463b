"""What one stream gets, and what each process does for a token of it.

Run: `python -m benchmarks.one_stream --kind catenary-int8`. `catenary up` runs with a real model; this
process reads one stream after the other. Printed are tokens a second between a stream's first and last token,
and of each process milliseconds of CPU a token, milliseconds in which it was ready to run and no core was
free, and how often it went to sleep. With `--tree DIR`, once for each, several working trees take turns
(their `catenary up` is started from there), so that what others do on the machine meanwhile strikes them
alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.overhead import SseConnection
from benchmarks.overhead.sse_client import request_of
from benchmarks.overhead.usage import Thread, Work, by_process, find_processes, read_work, work_since
from benchmarks.peers.report import table
from benchmarks.peers.server import Server, free_ports, make_model
from benchmarks.peers.subjects import OWN, SUBJECTS, Model, Place, subject

PARTS = {
    " services.engine.core ": "core",
    " services.engine ": "servicer",
    " services.router ": "router",
    " gateway ": "gateway",
    " services.tokenizer ": "tokenizer",
}
_HERE = Path(__file__).resolve().parents[1]
_WORDS = (
    "The story of a lighthouse keeper who counts ships at night and writes their names down goes like this"
)


class Run:
    """One tree's server, and what its streams gave."""

    def __init__(
        self, tree: Path, kind: str, model: Model, threads: int, port: int, variables: list[str]
    ) -> None:
        cpus = tuple(sorted(os.sched_getaffinity(0)))[:threads]
        place = Place(Path(), Path(), cpus, port)
        made = subject(kind, model, place)
        own = dict(variable.split("=", 1) for variable in variables)
        made = replace(made, environment={**made.environment, **own, "PYTHONPATH": str(tree)})
        self.name = " ".join([tree.name, *variables])
        self.model = model.name
        self.url = f"http://127.0.0.1:{place.port}"
        log = Path(tempfile.gettempdir()) / f"one-stream-{place.port}.log"
        self.server = Server(made, self.url, log)
        self.rates: list[float] = []
        self.threads: dict[Thread, Work] = {}
        self.tokens = 0

    async def stream(self, number: int, tokens: int) -> None:
        """One request; its figures are added."""
        pids = {**find_processes(self.server.pid, _part), "client": os.getpid()}
        request = request_of("/v1/completions", self._body(number, tokens))
        connection = await SseConnection.to(self.url)
        before = read_work(pids)
        try:
            times = await connection.ask(request)
        finally:
            connection.close()
        done = work_since(before, read_work(pids))
        self.rates.append((tokens - 1) / (times.last - times.first))
        for thread, work in done.items():
            self.threads[thread] = self.threads.get(thread, Work()) + work
        self.tokens += tokens

    def _body(self, number: int, tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": f"{number}: {_WORDS}",
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }


def _part(command: str) -> str | None:
    return next((name for module, name in PARTS.items() if module in command), None)


async def measure(runs: list[Run], options: argparse.Namespace) -> None:
    """Stream in turns."""
    for run in runs:
        await run.stream(-1, 32)
        run.rates.clear()
        run.threads.clear()
        run.tokens = 0
    for number in range(options.repeats):
        first = number % len(runs)
        for run in runs[first:] + runs[:first]:
            await run.stream(number, options.tokens)


def rows(run: Run, *, threads: bool) -> list[list[str]]:
    """Return a row for each process, or each thread of one."""
    works: dict[str, Work] = by_process(run.threads)
    if threads:
        busy = sorted(thread for thread, work in run.threads.items() if work.sleeps)
        works = {", ".join(thread): run.threads[thread] for thread in busy}
    lines = []
    for name, work in works.items():
        figures = (1e3 * work.cpu_s, 1e3 * work.waited_s, work.sleeps, work.taken_off)
        lines.append([run.name, name, *(f"{figure / run.tokens:.3f}" for figure in figures)])
    return lines


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", action="append", type=Path, help=f"default: {_HERE}")
    parser.add_argument("--variable", action="append", help="of the environment, once for each tree, or none")
    parser.add_argument("--kind", choices=[name for name in SUBJECTS if name.startswith(OWN)], default=OWN)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--by-thread", action="store_true")
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    model = make_model(options.model, lambda _line: None)
    trees = options.tree or [_HERE]
    variables = options.variable or [""] * len(trees)
    runs = [
        Run(tree.resolve(), options.kind, model, options.threads, port, [variable] if variable else [])
        for tree, variable, port in zip(trees, variables, free_ports(len(trees)), strict=True)
    ]
    # Else what servers start may take its modules from here.
    os.chdir(tempfile.gettempdir())
    try:
        for run in runs:
            run.server.start(120)
        uvloop.run(measure(runs, options))
        lines = [["tree", "tokens/s", "least", "most", "of the first tree's"]]
        for run in runs:
            middle = statistics.median(run.rates)
            ratio = statistics.median(a / b for a, b in zip(run.rates, runs[0].rates, strict=True))
            lines.append([run.name, *(f"{value:.1f}" for value in (middle, min(run.rates), max(run.rates)))])
            lines[-1].append(f"{ratio:.3f}")
        print("\n".join(table(lines)), end="\n\n")
        head = ["tree", "process", "CPU ms", "ready ms", "sleeps", "taken off"]
        body = [line for run in runs for line in rows(run, threads=options.by_thread)]
        print("a token\n\n" + "\n".join(table([head, *body])))
    finally:
        for run in runs:
            run.server.stop()


if __name__ == "__main__":
    main()
