"""KV within TLS: nothing can be read along, and who shows no certificate of the authority gets nothing."""

from __future__ import annotations

import gc
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from catenary.transfer import TlsConnector, TlsPaths, TransferError, TransferFault, TransferSettings
from services.engine.config import EngineConfig
from tests.support.certificates import make_authority, make_certificate
from tests.support.transfers import SIZE, Serving


def paths(directory: Path, name: str, authority: str, **fields: str) -> TlsPaths:
    files = make_certificate(directory, name, authority, **fields)
    return TlsPaths(str(files.cert), str(files.key), str(files.ca))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TlsPaths]:
    directory = tmp_path_factory.mktemp("tls")
    for authority in ("ours", "theirs"):
        make_authority(directory, authority)
    return {
        "engine": paths(directory, "engine", "ours"),
        "elsewhere": paths(directory, "elsewhere", "ours", hosts="DNS:elsewhere.example"),
        "stranger": paths(directory, "stranger", "theirs"),
    }


@pytest.fixture
def serving(certificates: dict[str, TlsPaths], tmp_path: Path) -> Iterator[Serving]:
    serving = Serving(TlsConnector, tmp_path, tls=certificates["engine"], max_transfers=2)
    yield serving
    serving.server.close()


def fault_of(act: Callable[[], object]) -> TransferFault:
    with pytest.raises(TransferError) as raised:
        act()
    return raised.value.fault


class Relay:
    """Passes one connection on and keeps what the server says."""

    def __init__(self, address: str) -> None:
        self.heard = bytearray()
        host, port = address.split(":")
        self._there = socket.create_connection((host, int(port)), timeout=10)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        here, _ = self._listener.accept()
        threading.Thread(target=self._pass_on, args=(here, self._there, bytearray()), daemon=True).start()
        self._pass_on(self._there, here, self.heard)

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket, heard: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                heard += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def test_all_blocks_arrive_and_none_can_be_read_along(serving: Serving) -> None:
    relay = Relay(serving.address)
    assert b"".join(serving.fetch(address=relay.address)) == bytes(serving.source.data)
    assert len(relay.heard) > len(serving.source.data)
    assert bytes(serving.source.data[:SIZE]) not in relay.heard
    assert serving.fetch(count=0) == []


@pytest.mark.advisory("CVE-2026-34159")
def test_strangers_get_nothing_and_take_no_place_for_long(
    serving: Serving, certificates: dict[str, TlsPaths]
) -> None:
    plain = serving.connect()
    plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with suppress(OSError):
        while answer := plain.recv(1 << 16):
            assert b"HTTP" not in answer
    for name in ("stranger", None):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(certificates["engine"].ca)
        if name is not None:
            context.load_cert_chain(certificates[name].cert, certificates[name].key)
        stranger = serving.connect()
        with suppress(OSError), context.wrap_socket(stranger, server_hostname="127.0.0.1") as sock:
            assert sock.recv(1) == b""
    serving.still_serves()


@pytest.mark.parametrize("server", ["stranger", "elsewhere"])
def test_who_is_not_the_engine_of_the_offer_is_not_believed(
    certificates: dict[str, TlsPaths], tmp_path: Path, server: str
) -> None:
    serving = Serving(TlsConnector, tmp_path, tls=certificates[server])
    serving.client = TlsConnector(replace(serving.settings, tls=certificates["engine"]))
    assert fault_of(serving.fetch) is TransferFault.PROTOCOL
    serving.client = TlsConnector(replace(serving.settings, tls=None))
    assert fault_of(serving.fetch) is TransferFault.CONNECTOR
    serving.server.close()


def test_a_full_engine_says_so(certificates: dict[str, TlsPaths], tmp_path: Path) -> None:
    serving = Serving(TlsConnector, tmp_path, tls=certificates["engine"], max_transfers=0)
    assert [fault_of(serving.fetch) for _ in range(20)] == [TransferFault.BUSY] * 20


def test_certificates_are_asked_for_at_the_start(certificates: dict[str, TlsPaths], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kv_connector tls needs tls_cert"):
        EngineConfig(kv_connector="tls", role="decode")
    with pytest.raises(OSError, match="needs tls_cert"):
        Serving(TlsConnector, tmp_path)


@pytest.mark.parametrize("host", ["a" * 300, ".", "127.0.0.1"])
def test_a_connection_that_cannot_be_wrapped_is_a_fault_and_closed(
    certificates: dict[str, TlsPaths], tmp_path: Path, host: str
) -> None:
    connector: Any = TlsConnector(
        TransferSettings("127.0.0.1:0", None, tmp_path, 5.0, 1, certificates["engine"])
    )
    listener = socket.create_server(("127.0.0.1", 0))
    dialled = socket.create_connection(listener.getsockname()[:2])
    accepted, _ = listener.accept()
    # The peer has left before it was asked.
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    accepted.close()
    listener.close()
    # Of tests that ran before.
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    fault = fault_of(lambda: connector.wrapped(dialled, host, time.monotonic() + 5))
    assert fault is (TransferFault.BUSY if host == "127.0.0.1" else TransferFault.UNREACHABLE)
    dialled.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_renewed_certificates_count_from_the_next_connection_on(
    certificates: dict[str, TlsPaths], tmp_path: Path
) -> None:
    used = TlsPaths(*(str(tmp_path / name) for name in ("cert", "key", "ca")))

    def renew(source: TlsPaths) -> None:
        for name in ("cert", "key", "ca"):
            Path(getattr(used, name)).write_bytes(Path(getattr(source, name)).read_bytes())

    renew(certificates["stranger"])
    serving = Serving(TlsConnector, tmp_path, tls=used)
    serving.still_serves()
    outsider = TlsConnector(replace(serving.settings, tls=certificates["engine"]))
    own, serving.client = serving.client, outsider
    assert fault_of(serving.fetch) is TransferFault.PROTOCOL
    renew(certificates["engine"])
    serving.still_serves()
    serving.client = own
    serving.still_serves()
    # Half written: what was there before goes on.
    Path(used.cert).write_text("-----BEGIN")
    serving.still_serves()
    Path(used.key).unlink()
    serving.still_serves()
    serving.server.close()
