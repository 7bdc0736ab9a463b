"""All servers of a comparison: prepared, started one after the other, and ended whatever happens."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from benchmarks.peers.environments import PeerError
from benchmarks.peers.server import Server
from benchmarks.peers.subjects import Model, Place, Subject, subject
from services.engine.model.preparation import default_cache_dir, prepare_model
from services.engine.model.sources import SourceKind, resolve_source

Tell = Callable[[str], None]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Opened:
    """Started servers, and the seconds from each one's start to its first answer."""

    servers: list[Server]
    starts: dict[str, float]
    model: Model


@contextmanager
def open_servers(
    names: Sequence[str], source: str, peers: Path, threads: int, timeout_s: float, tell: Tell
) -> Iterator[Opened]:
    """Starts the subjects; the one that was never started with this command before is started twice.

    A first start compiles and caches, a second one is what a restart costs. Raises PeerError, ModelError.
    """
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    if threads > len(cpus):
        raise PeerError(f"{threads} threads on {len(cpus)} cores")
    model = make_model(source, tell)
    cache = default_cache_dir() / "benchmarks"
    logs = cache / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    places = [Place(peers, cache, cpus[:threads], port) for port in free_ports(len(names))]
    subjects = [subject(name, model, place) for name, place in zip(names, places, strict=True)]
    servers: list[Server] = []
    starts: dict[str, float] = {}
    with interrupted_by_signals(), ExitStack() as ending:
        try:
            for one, place in zip(subjects, places, strict=True):
                _make_file(one, tell)
                server = Server(one, f"http://127.0.0.1:{place.port}", logs / f"{one.name}.log")
                servers.append(server)
                ending.callback(server.stop)
                marker = cache / f"started-{one.name}-{_digest(one, place)}"
                if not marker.exists():
                    tell(f"first start of {one.name}: {server.start(timeout_s):.1f} s, not counted")
                    server.stop()
                    marker.touch()
                starts[one.name] = server.start(timeout_s)
                tell(f"{one.name}: {starts[one.name]:.1f} s to its first answer")
                server.rest()
            yield Opened(servers, starts, model)
        finally:
            # A second Ctrl-C, while they end, is not to leave one behind.
            for number in _ENDING:
                signal.signal(number, signal.SIG_IGN)


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Whatever ends this process ends its servers too: some have processes that would stay."""
    before = {number: signal.signal(number, _interrupt) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def make_model(source: str, tell: Tell) -> Model:
    """What all servers are started with. Raises ModelError."""
    found = resolve_source(source)
    directory = prepare_model(source, progress=tell)
    return Model(
        directory, found.path if found.kind is SourceKind.GGUF else None, found.name.replace("/", "-")
    )


def _make_file(one: Subject, tell: Tell) -> None:
    if one.needs is None or one.needs[0].exists():
        return
    tell(f"writing {one.needs[0]}")
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(one.needs[1], cwd=root, capture_output=True, text=True, check=False)
    if result.returncode:
        raise PeerError(f"{one.needs[0]} cannot be written: {result.stderr.strip()[-300:]}")


def _digest(one: Subject, place: Place) -> str:
    """Tells starts with different options apart; a port is no option."""
    port = str(place.port)
    words = ["" if word == port else word for word in one.command]
    text = json.dumps([words, sorted(one.environment.items()), sys.version])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, each another one."""
    with ExitStack() as held:
        listeners = [held.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]
