"""Servers under comparison: how they start and end, whatever happens."""

from __future__ import annotations

import signal
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import compare
from benchmarks.peers import Model, PeerError, open_servers
from benchmarks.peers import server as servers
from benchmarks.peers.server import Server
from benchmarks.peers.subjects import Place, Subject
from tests.support.service_process import running

CHILD = 'child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])'
ANSWERS = f"""
import http.server, subprocess, sys
{CHILD}
class Handler(http.server.BaseHTTPRequestHandler):
    tries = 0
    def do_POST(self):
        Handler.tries += 1
        self.send_response(503 if Handler.tries == 1 else CODE)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def fake(name: str, code: str, port: int) -> Subject:
    return Subject(name, "bf16", (sys.executable, "-c", code, str(port)), model="m")


def started(tmp_path: Path, code: str, port: int) -> Server:
    return Server(fake("one", code, port), f"http://127.0.0.1:{port}", tmp_path / "log")


def servers_and_children() -> list[psutil.Process]:
    """Processes of the fake servers and what they spawned, among the children of other tests."""
    ours = ("http.server", "time.sleep(600)")
    below = psutil.Process().children(recursive=True)
    return [one for one in below if any(code in " ".join(one.cmdline()) for code in ours)]


def test_server_is_ready_with_its_first_answer_and_leaves_nothing(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    server = started(tmp_path, ANSWERS.replace("CODE", "200"), unused_tcp_port)
    try:
        assert 0 < server.start(30) < 30
        assert server.cpu_seconds() > 0
        tree = servers_and_children()
        server.rest()
        deadline = time.monotonic() + 10
        while {one.status() for one in tree} != {psutil.STATUS_STOPPED}:
            assert time.monotonic() < deadline
        server.wake()
    finally:
        server.stop()
    assert not any(running(one.pid) for one in tree)


def test_server_that_refuses_or_ends(tmp_path: Path, unused_tcp_port: int) -> None:
    server = started(tmp_path, ANSWERS.replace("CODE", "422"), unused_tcp_port)
    try:
        with pytest.raises(PeerError, match="one refuses a request"):
            server.start(30)
    finally:
        server.stop()
    ends = started(tmp_path, "import sys; print('no model'); sys.exit(3)", unused_tcp_port)
    with pytest.raises(PeerError, match="one ended with code 3: no model"):
        ends.start(30)


def test_server_whose_port_somebody_else_has_is_not_taken_for_it(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    other = started(tmp_path, ANSWERS.replace("CODE", "200"), unused_tcp_port)
    try:
        other.start(30)
        second = started(tmp_path, ANSWERS.replace("CODE", "200"), unused_tcp_port)
        with pytest.raises(PeerError, match="is somebody else's already"):
            second.start(30)
        assert other.ended() is None
    finally:
        other.stop()


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Subjects are servers that answer at once, and `broken` ends."""
    answers = ANSWERS.replace("503 if Handler.tries == 1 else CODE", "200").replace(CHILD, "")

    def made(name: str, model: Model, place: Place) -> Subject:
        return fake(name, "exit(3)" if name == "broken" else answers, place.port)

    monkeypatch.setattr(servers, "make_model", lambda source, tell: Model(tmp_path, None, source))
    monkeypatch.setattr(servers, "default_cache_dir", lambda: tmp_path)
    monkeypatch.setattr(servers, "subject", made)


def opened(*names: str) -> Any:
    return open_servers(names, "m", Path("/nowhere"), 1, 30, lambda line: None)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_leaves_no_server(number: int) -> None:
    before = signal.getsignal(number)
    tree: list[psutil.Process] = []

    def interrupted() -> None:
        with opened("one", "two") as found:
            assert list(found.starts) == ["one", "two"]
            tree.extend(servers_and_children())
            signal.raise_signal(number)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(tree) >= 2
    assert not any(running(one.pid) for one in tree)
    assert signal.getsignal(number) is before


@pytest.mark.usefixtures("fakes")
def test_server_that_does_not_start_takes_the_others_with_it() -> None:
    with pytest.raises(PeerError, match="broken ended with code 3"), opened("one", "broken"):
        pass
    assert not [
        one for one in psutil.Process().children(recursive=True) if "http.server" in " ".join(one.cmdline())
    ]


class Breaks:
    """Measures as many runs as it is told, then ends as it is told."""

    def __init__(self, samples: list[Any], error: BaseException | None) -> None:
        self.samples = samples
        self._error = error

    def all_runs(self, streams: Any, repeats: int, tell: Any) -> list[Any]:
        if self._error is not None:
            raise self._error
        return self.samples


def test_what_was_measured_before_a_server_died_is_told() -> None:
    options = Namespace(streams=[1], repeats=1)

    def run(*arguments: Any) -> str | None:
        return compare.measured(Breaks(*arguments), options)  # type: ignore[arg-type]

    assert run([1], PeerError("it died")) == "it died"
    assert run([1], KeyboardInterrupt()) == "Ctrl-C"
    assert run([1], None) is None
    with pytest.raises(PeerError):
        run([], PeerError("it died"))
