from __future__ import annotations

import socket

import pytest

from catenary.cli.up.ports import bracketed, claim_port, claim_ports, loopback_of
from catenary.runtime import StartRefused


def test_port_in_use_is_refused_with_the_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartRefused, match=f"127.0.0.1:{port} is in use; choose another with --port"):
            claim_port("127.0.0.1", port, "port")


def test_unknown_address_is_refused() -> None:
    with pytest.raises(StartRefused, match="cannot be listened on"):
        claim_port("192.0.2.1", 0, "port")


def test_zero_finds_free_ports() -> None:
    ports = claim_ports("127.0.0.1", 0, 3, "port")
    assert len(ports) == 3
    assert all(port > 0 for port in ports)


def test_addresses() -> None:
    assert loopback_of("0.0.0.0") == "127.0.0.1"
    assert loopback_of("::") == "::1"
    assert loopback_of("10.0.0.1") == "10.0.0.1"
    assert bracketed("::1") == "[::1]"
    assert bracketed("127.0.0.1") == "127.0.0.1"
