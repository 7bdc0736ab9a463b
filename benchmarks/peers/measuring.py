"""Runs against servers in turn with the same requests, so that noise strikes all alike; and the machine."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.environments import PeerError
from benchmarks.peers.server import Server
from catenary_apps.load import (
    BenchError,
    Conversation,
    LoadPlan,
    LoadResult,
    PlainWords,
    Source,
    Target,
    TokenizerText,
    parse_lengths,
    random_conversations,
    run,
)

FIRST_TOKEN = 0
"""The number of streams that stands for a time to first token."""
_TTFT_TOKENS = 4
_WARM_UP_TOKENS = 8

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of the requests.

    `words`: of the prompt whose first token is timed; `prompts` of them a repeat.
    """

    prompt_tokens: int
    output_tokens: int
    words: int
    prompts: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One run. `value`: output tokens per second, or with FIRST_TOKEN streams milliseconds.

    `cpu_s`: processor time of the server; `resting_cpu`: cores that the servers which had nothing to do took.
    """

    subject: str
    streams: int
    repeat: int
    value: float
    seconds: float
    cpu_s: float
    resting_cpu: float
    prompt_tokens: int

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


class Measuring:
    """Measures started servers, one of which is awake at a time, as far as they can be put to sleep."""

    def __init__(self, servers: Sequence[Server], directory: Path, lengths: Lengths) -> None:
        self._servers = list(servers)
        self._exact: Source = TokenizerText.load(directory)
        self._words: Source = PlainWords()
        self._lengths = lengths
        self._awake: Server | None = None
        self.samples: list[Sample] = []
        """What has been measured, also where an error ended it."""

    def warm_up(self, streams: Sequence[int], tell: Tell) -> None:
        """One short run of each kind for each server, not counted. Raises PeerError."""
        for server in self._servers:
            tell(f"warming up {server.subject.name}")
            for count in streams:
                self._run(server, count, repeat=-1, output_tokens=_WARM_UP_TOKENS)
            if self._lengths.prompts:
                self._run(server, FIRST_TOKEN, repeat=-1)

    def all_runs(self, streams: Sequence[int], repeats: int, tell: Tell) -> list[Sample]:
        """Each kind of run `repeats` times; servers take turns, and who begins changes. Raises PeerError."""
        kinds = [*streams, FIRST_TOKEN] if self._lengths.prompts else list(streams)
        for repeat in range(repeats):
            for kind in kinds:
                start = repeat % len(self._servers)
                for server in self._servers[start:] + self._servers[:start]:
                    sample = self._run(server, kind, repeat)
                    self.samples.append(sample)
                    tell(_line(sample))
        return self.samples

    def _run(self, server: Server, streams: int, repeat: int, output_tokens: int | None = None) -> Sample:
        self._wake(server)
        others = [one for one in self._servers if one is not server and not one.subject.sleeps]
        resting = sum(one.cpu_seconds() for one in others)
        before, started = server.cpu_seconds(), time.monotonic()
        result = self._load(server, streams, repeat, output_tokens)
        seconds = time.monotonic() - started
        if streams == FIRST_TOKEN:
            value = float(result.ttft_ms.median or math.nan)
        else:
            value = float(result.output_throughput or math.nan)
        return Sample(
            server.subject.name,
            streams,
            repeat,
            value,
            result.duration_s,
            server.cpu_seconds() - before,
            max(0.0, sum(one.cpu_seconds() for one in others) - resting) / seconds,
            int(result.input_tokens or 0),
        )

    def _load(self, server: Server, streams: int, repeat: int, output_tokens: int | None) -> LoadResult:
        conversations, concurrency = self._requests(streams, repeat, output_tokens)
        subject = server.subject
        target = Target(
            base_url=server.url, model=subject.model, extra_body=dict(subject.extra_body), timeout_s=240
        )
        plan = LoadPlan(
            target=target, conversations=conversations, max_concurrency=concurrency, strict_lengths=True
        )
        try:
            result = run(plan)
        except BenchError as error:
            raise PeerError(f"{subject.name}: {error}") from None
        if (ended := server.ended()) is not None:
            raise PeerError(ended)
        if result.failures:
            detail = next(record.detail for record in result.records if record.failure is not None)
            raise PeerError(f"{subject.name} failed at {streams} streams: {result.failures}, {detail}")
        asked = sum(turn.output_tokens or 0 for one in conversations for turn in one.turns)
        if result.output_tokens != asked:
            raise PeerError(f"{subject.name} says {result.output_tokens} tokens where {asked} were asked for")
        return result

    def _requests(
        self, streams: int, repeat: int, output_tokens: int | None
    ) -> tuple[list[Conversation], int]:
        # Each run has prompts of its own, the same for all servers, so that no prefix is there already.
        lengths, seed = self._lengths, 1000 * (repeat + 1) + streams
        if streams == FIRST_TOKEN:
            made = random_conversations(
                max(1, lengths.prompts),
                prompts=parse_lengths(str(lengths.words)),
                outputs=parse_lengths(str(_TTFT_TOKENS)),
                source=self._words,
                seed=seed,
            )
            return made, 1
        # A single stream is over soon, so it is asked twice.
        made = random_conversations(
            max(2, streams),
            prompts=parse_lengths(str(lengths.prompt_tokens)),
            outputs=parse_lengths(str(output_tokens or lengths.output_tokens)),
            source=self._exact,
            seed=seed if output_tokens is None else seed + 500,
        )
        return made, streams

    def _wake(self, server: Server) -> None:
        if self._awake is not None and self._awake is not server:
            self._awake.rest()
        server.wake()
        self._awake = server


def _line(sample: Sample) -> str:
    if sample.streams == FIRST_TOKEN:
        return f"#{sample.repeat + 1} {sample.subject}: first token after {sample.value:.0f} ms"
    return f"#{sample.repeat + 1} {sample.subject}, {sample.streams} streams: {sample.value:.1f} tokens/s"


def machine() -> dict[str, Any]:
    """Return the machine's name, processor, cores, memory and load, and the commit of this working tree."""
    return {
        "host": platform.node(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "commit": _commit(),
    }


def same_kind(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether figures of two machines may be compared: the processor and the number of cores are
    alike."""
    return all(first.get(key) == second.get(key) for key in ("cpu", "cores"))


def cpu_model() -> str:
    """Name of the processor, with family, model and stepping, since virtual machines call many alike."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    numbers = "/".join(fields.get(name, "?") for name in ("cpu family", "model", "stepping"))
    return f"{fields.get('model name', platform.machine())} ({numbers})"


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
