"""Servers under measurement: started, timed to the first answer, stopped in turn, ended together."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from benchmarks.peers.environments import PeerError
from benchmarks.peers.subjects import Model, Place, Subject, clean_environment, subject
from catenary_apps.up.child import wrapped
from services.engine.model.preparation import default_cache_dir, prepare_model
from services.engine.model.sources import SourceKind, resolve_source

_POLL_S = 0.1
_END_S = 30.0
_REST_S = 1.0
_TAIL_LINES = 8


class Server:
    """One process group, or the tree below it. It dies with this process."""

    def __init__(self, subject: Subject, url: str, log: Path) -> None:
        self.subject = subject
        self.url = url
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process that was started. Raises PeerError."""
        if self._process is None:
            raise PeerError(f"{self.subject.name} does not run")
        return self._process.pid

    def start(self, timeout_s: float) -> float:
        """Start it; returns the seconds until it had answered a request. Raises PeerError."""
        if self._answers():
            raise PeerError(f"{self.url} is somebody else's already: {self.subject.name} cannot have it")
        environment = {**clean_environment(), **self.subject.environment}
        started = time.monotonic()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                wrapped(tuple(self.subject.command)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        while not self._answers():
            if (ended := self.ended()) is not None:
                raise PeerError(ended)
            if time.monotonic() - started > timeout_s:
                self.stop()
                raise PeerError(f"{self.subject.name} gave no answer in {timeout_s:g} s: {self._tail()}")
            time.sleep(_POLL_S)
        return time.monotonic() - started

    def ended(self) -> str | None:
        """Return the exit code and the last output; None while the server runs."""
        code = None if self._process is None else self._process.poll()
        return None if code is None else f"{self.subject.name} ended with code {code}: {self._tail()}"

    def stop(self) -> None:
        """End it and all that it started. Idempotent."""
        if self._process is None:
            return
        self.wake()
        tree = self._tree()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        # What it should have ended itself.
        _, alive = psutil.wait_procs(tree, timeout=_REST_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(alive, timeout=_REST_S)
        self._process = None

    def rest(self) -> None:
        """Stop it where it is, if it bears that, so that it takes nothing from the others."""
        if self.subject.sleeps:
            self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let the server go on."""
        if self.subject.sleeps:
            self._signal(signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """User and system time of its live processes and their ended children."""
        total = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def _answers(self) -> bool:
        body = {"model": self.subject.model, "prompt": "Hello", "max_tokens": 1, **self.subject.extra_body}
        data = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
        request = urllib.request.Request(
            f"{self.url}/v1/completions", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            if 400 <= error.code < 500 and error.code not in (404, 429):
                raise PeerError(f"{self.subject.name} refuses a request: {error.read()[:300]!r}") from None
            return False
        except OSError:
            return False

    def _signal(self, number: signal.Signals) -> None:
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                os.kill(process.pid, number)

    def _tree(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return " | ".join(lines) + f" (log: {self.log})"


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
    """Start the subjects; the one that was never started with this command before is started twice.

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
    """Return the model that all servers are started with. Raises ModelError."""
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
    """Tell starts with different options apart; a port is no option."""
    port = str(place.port)
    words = ["" if word == port else word for word in one.command]
    text = json.dumps([words, sorted(one.environment.items()), sys.version])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def free_ports(count: int) -> list[int]:
    """Return distinct free ports."""
    with ExitStack() as held:
        listeners = [held.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]
