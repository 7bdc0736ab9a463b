from __future__ import annotations

import socket

import pytest

from catenary.runtime import StartRefused
from catenary_apps.up.resources import PortClaims, bracketed, loopback_of


def test_port_in_use_is_refused_with_the_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartRefused, match=f"127.0.0.1:{port} is in use; choose another with --port"):
            PortClaims().claim("127.0.0.1", port, "port")


def test_unknown_address_is_refused() -> None:
    with pytest.raises(StartRefused, match="cannot be listened on"):
        PortClaims().claim("192.0.2.1", 0, "port")


def test_zero_finds_free_ports() -> None:
    ports = PortClaims().claim_range("127.0.0.1", 0, 3, "port")
    assert len(set(ports)) == 3
    assert all(port > 0 for port in ports)


def test_two_options_cannot_have_the_same_port() -> None:
    claims = PortClaims()
    port = claims.claim("127.0.0.1", 0, "port")
    with pytest.raises(StartRefused, match=f"--router-port: port {port} is taken by --port"):
        claims.claim("127.0.0.1", port, "router-port")


def test_ports_end_at_65535() -> None:
    with pytest.raises(StartRefused, match="--port: 2 ports from 65535 on go beyond 65535"):
        PortClaims().claim_range("127.0.0.1", 65535, 2, "port")


def test_a_name_that_no_host_can_have_is_refused() -> None:
    with pytest.raises(StartRefused, match=r"--host 'a\.\.b': not the name or the address"):
        PortClaims().claim("a..b", 0, "port")


def test_addresses() -> None:
    assert loopback_of("0.0.0.0") == "127.0.0.1"
    assert loopback_of("::") == "::1"
    assert loopback_of("10.0.0.1") == "10.0.0.1"
    assert bracketed("::1") == "[::1]"
    assert bracketed("127.0.0.1") == "127.0.0.1"
