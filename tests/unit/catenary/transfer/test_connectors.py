"""Connectors by themselves: what arrives is what was offered, and nobody else gets or breaks anything."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from catenary.transfer import (
    BUILTIN,
    Fetch,
    TransferError,
    TransferFault,
    host_id,
    load_connector,
    shm,
)
from catenary.transfer.protocol import GREETING_BYTES, REQUEST_BYTES, make_request
from catenary.transfer.shm import sweep
from tests.support.repository import ROOT
from tests.support.transfers import BINDING, BLOCKS, CHUNK, LAYOUT, SIZE, Serving


@pytest.fixture(params=["shm", "tcp"])
def serving(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Serving]:
    serving = Serving(BUILTIN[request.param], tmp_path / "kv")
    yield serving
    serving.server.close()
    serving.client.close()


def fault_of(act: Callable[[], object]) -> TransferFault:
    with pytest.raises(TransferError) as raised:
        act()
    return raised.value.fault


def test_all_blocks_some_or_none(serving: Serving) -> None:
    data = bytes(serving.source.data)
    got = serving.fetch()
    assert [len(chunk) for chunk in got] == [CHUNK * SIZE, CHUNK * SIZE, 3 * SIZE]
    assert b"".join(got) == data
    assert b"".join(serving.fetch(first=9, count=2)) == data[9 * SIZE :]
    assert serving.fetch(count=0) == []
    wait_for(lambda: serving.source.over == [7, 7, 7])


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_only_who_has_the_ticket_for_this_prompt_gets_it(serving: Serving) -> None:
    fetch = serving.fetch
    assert fault_of(lambda: fetch(ticket=os.urandom(32))) is TransferFault.GONE
    assert fault_of(lambda: fetch(layout=b"x" * 16)) is TransferFault.LAYOUT
    assert fault_of(lambda: fetch(binding=b"x" * 16)) is TransferFault.MISMATCH
    assert fault_of(lambda: fetch(first=BLOCKS)) is TransferFault.MISMATCH
    assert fault_of(lambda: fetch(count=2**32 - 1)) is TransferFault.MISMATCH
    assert fault_of(lambda: fetch(block_bytes=SIZE + 1)) is TransferFault.PROTOCOL
    assert serving.source.over == []
    serving.source.live = False
    assert fault_of(fetch) is TransferFault.GONE


def test_the_name_of_an_offer_is_not_the_right_to_it(serving: Serving) -> None:
    """Whoever overhears a request can neither play it again nor change it."""
    ask = Fetch(
        serving.source.ticket, serving.address, BINDING, LAYOUT, 0, BLOCKS, SIZE, CHUNK, time.monotonic() + 5
    )
    with serving.connect() as first:
        heard = make_request(ask, first.recv(GREETING_BYTES)[-16:])
    for request in (heard, heard[:-1] + bytes([heard[-1] ^ 1])):
        with serving.connect() as peer:
            peer.recv(GREETING_BYTES)
            peer.sendall(request)
            _, status, _, _ = struct.unpack("<4sHII", peer.recv(100))
            assert status == 1
            assert peer.recv(10) == b""
    assert serving.source.reads == 0


@pytest.mark.parametrize(
    "words",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"CtKv" + b"\xff" * (REQUEST_BYTES - 4), b"CtKv\x01"],
)
def test_strangers_who_speak_otherwise(serving: Serving, words: bytes) -> None:
    with serving.connect() as peer:
        peer.recv(GREETING_BYTES)
        with suppress(OSError):
            peer.sendall(words)
            peer.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            assert len(peer.recv(4096)) <= 14
    serving.still_serves()


@pytest.mark.advisory("CVE-2026-34159")
def test_strangers_who_say_random_things(serving: Serving) -> None:
    rng = random.Random(5)
    for _ in range(60):
        with serving.connect() as peer, suppress(OSError):
            peer.sendall(rng.randbytes(rng.randrange(2 * REQUEST_BYTES)))
    serving.still_serves()


def test_silent_strangers_take_no_place_for_long(serving: Serving) -> None:
    """A crowd that connects and says nothing, or a byte now and then, keeps nobody out."""
    crowd = [serving.connect() for _ in range(20)]
    for peer in crowd:
        with suppress(OSError):
            peer.sendall(b"C")
    serving.still_serves()
    for peer in crowd:
        peer.close()


def test_a_receiver_that_stops_reading_is_given_up(tmp_path: Path) -> None:
    serving = Serving(BUILTIN["tcp"], tmp_path, timeout_s=2.0, max_transfers=1)
    big = memoryview(bytes(8 << 20))
    serving.source.data = big
    serving.source.offered = replace(serving.source.offered, block_bytes=len(big) // BLOCKS)
    fetch = Fetch(
        serving.source.ticket, serving.address, BINDING, LAYOUT, 0, 4, SIZE, CHUNK, time.monotonic() + 5
    )
    with serving.connect() as peer:
        peer.sendall(make_request(fetch, peer.recv(GREETING_BYTES)[-16:]))
        peer.recv(14)
        # The only place is taken by one who has shown a ticket: it is his until his time is over.
        assert fault_of(serving.fetch) is TransferFault.BUSY
        server: Any = serving.server
        wait_for(lambda: len(server.server) == 0)
    assert serving.source.over == []
    serving.server.close()


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_a_full_engine_says_so(kind: str, tmp_path: Path) -> None:
    """Also to one who is not quick enough to ask before it hangs up."""
    serving = Serving(BUILTIN[kind], tmp_path, max_transfers=0)
    assert [fault_of(serving.fetch) for _ in range(20)] == [TransferFault.BUSY] * 20


def test_an_engine_without_threads_is_full(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert fault_of(serving.fetch) is TransferFault.BUSY
    serving.still_serves()


def test_kv_does_not_pile_up_for_who_does_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = Serving(BUILTIN["shm"], tmp_path, timeout_s=0.3)
    filled: list[int] = []
    fill = shm.fill

    def counted(memory: int, parts: Any) -> None:
        filled.append(memory)
        fill(memory, parts)

    monkeypatch.setattr(shm, "fill", counted)
    fetch = Fetch(
        serving.source.ticket, serving.address, BINDING, LAYOUT, 0, BLOCKS, SIZE, CHUNK, time.monotonic() + 5
    )
    with serving.connect() as peer:
        peer.sendall(make_request(fetch, peer.recv(GREETING_BYTES)[-16:]))
        server: Any = serving.server
        wait_for(lambda: filled and len(server.server) == 0)
    assert len(filled) == 1
    serving.server.close()


class Peer:
    """Stands in for an offering engine, and says what it is told to."""

    def __init__(self, words: bytes, *, hold: bool = False) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._words, self._hold = words, hold
        self._done = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.sendall(self._words)
            if self._hold:
                self._done.wait(10)

    def close(self) -> None:
        self._done.set()
        self._listener.close()


GREETING = struct.pack("<4sH16s", b"CtKv", 1, b"n" * 16)


def reply(status: int = 0, block_bytes: int = SIZE, count: int = BLOCKS) -> bytes:
    return GREETING + struct.pack("<4sHII", b"CtKv", status, block_bytes, count)


@pytest.mark.parametrize(
    ("words", "hold", "fault"),
    [
        (b"", False, TransferFault.PROTOCOL),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3, False, TransferFault.PROTOCOL),
        (GREETING.replace(b"\x01", b"\x02", 1), False, TransferFault.PROTOCOL),
        (GREETING + b"\xff" * 14, False, TransferFault.PROTOCOL),
        (reply(block_bytes=2**32 - 1), False, TransferFault.PROTOCOL),
        (reply(count=2**32 - 1), False, TransferFault.PROTOCOL),
        (reply(status=99), False, TransferFault.PROTOCOL),
        (reply() + b"\0" * (2 * SIZE), False, TransferFault.PROTOCOL),
        (reply() + b"\0" * (BLOCKS * (SIZE + 16)), False, TransferFault.CHECKSUM),
        (GREETING[:5], True, TransferFault.TIMEOUT),
        (reply() + b"\0" * 50, True, TransferFault.TIMEOUT),
    ],
)
@pytest.mark.advisory("CVE-2026-34159")
def test_offering_engines_that_lie(tmp_path: Path, words: bytes, hold: bool, fault: TransferFault) -> None:
    peer = Peer(words, hold=hold)
    serving = Serving(BUILTIN["tcp"], tmp_path)
    assert fault_of(lambda: serving.fetch(address=peer.address, timeout_s=0.4 if hold else 5)) is fault
    peer.close()
    serving.server.close()


OFFERS = """
import sys, time
from pathlib import Path
from catenary.transfer import BUILTIN
from tests.support.transfers import Serving
serving = Serving(BUILTIN[sys.argv[1]], Path(sys.argv[2]))
print(serving.address, serving.source.ticket.hex(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_an_offering_engine_that_is_killed_leaves_nothing(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OFFERS, name, str(tmp_path)]
    root = str(ROOT)
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=root, env={**os.environ, "PYTHONPATH": root}
    )
    assert child.stdout is not None
    address, ticket = child.stdout.readline().split()
    mine = Serving(BUILTIN[name], tmp_path / "mine")
    assert b"".join(mine.fetch(address=address, ticket=bytes.fromhex(ticket))) == bytes(mine.source.data)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    fetch = lambda: mine.fetch(address=address, ticket=bytes.fromhex(ticket))  # noqa: E731
    assert fault_of(fetch) is TransferFault.UNREACHABLE
    # The next engine that starts in the directory removes the socket, and not those of the living.
    other = Serving(BUILTIN["shm"], tmp_path)
    assert sorted(tmp_path.glob("*.kv")) == [Path(other.address)]
    assert sweep(tmp_path) == 0
    other.still_serves()
    other.server.close()
    assert list(tmp_path.glob("*.kv")) == []
    mine.server.close()


def test_an_engine_that_starts_beside_another_leaves_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before that one listens on it."""
    listen = shm.OfferServer

    def late(*values: Any, **options: Any) -> Any:
        sweep(tmp_path)
        return listen(*values, **options)

    monkeypatch.setattr(shm, "OfferServer", late)
    serving = Serving(BUILTIN["shm"], tmp_path)
    assert list(tmp_path.iterdir()) == [Path(serving.address)]
    serving.still_serves()
    serving.server.close()


def test_a_directory_that_others_made_or_may_write_to_is_not_taken(tmp_path: Path) -> None:
    theirs, open_to_all, link = tmp_path / "theirs", tmp_path / "open", tmp_path / "link"
    for path in (theirs, open_to_all):
        path.mkdir()
    open_to_all.chmod(0o777)
    link.symlink_to(tmp_path)
    if os.geteuid() == 0:
        os.chown(theirs, 65534, 65534)
        with pytest.raises(OSError, match="another user's"):
            Serving(BUILTIN["shm"], theirs)
    with pytest.raises(OSError, match="chmod go-w"):
        Serving(BUILTIN["shm"], open_to_all)
    with pytest.raises(OSError, match="or a link"):
        Serving(BUILTIN["shm"], link)
    assert list(open_to_all.iterdir()) == []


def test_what_a_sweep_leaves_alone(tmp_path: Path) -> None:
    (tmp_path / "file.kv").write_text("no socket")
    (tmp_path / "link.kv").symlink_to("/etc/passwd")
    assert sweep(tmp_path) == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_connectors_are_found_by_name_and_by_class() -> None:
    assert load_connector("tcp", BUILTIN) is BUILTIN["tcp"]
    plugged = load_connector("tests.support.kv_connectors:PluggedConnector", BUILTIN)
    assert plugged.name == "plugged"
    for spec in ("rdma", "no.such.module:Class", "tests.support.kv_connectors:Nothing", "json:JSONDecoder"):
        with pytest.raises(ValueError, match="kv-connector"):
            load_connector(spec, BUILTIN)


def test_hosts_have_one_name() -> None:
    assert len(host_id()) == 32
    assert host_id() == host_id()
