"""The addresses behind a name: one service may run several times under it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from ipaddress import ip_address

from catenary.rpc.addresses import TcpAddress, UnixAddress, parse_address


def is_name(address: str) -> bool:
    """Whether an address has a host name, which may mean others tomorrow. Raises ValueError."""
    parsed = parse_address(address)
    if isinstance(parsed, UnixAddress):
        return False
    try:
        ip_address(parsed.host.partition("%")[0])
    except ValueError:
        return True
    return False


async def resolve(address: str) -> tuple[str, ...]:
    """All addresses that `host:port` stands for now, in a stable order; an address without a name is itself.

    Raises:
        ValueError: `address` is not an address.
        OSError: the name cannot be resolved now.
    """
    parsed = parse_address(address)
    if isinstance(parsed, UnixAddress) or not is_name(address):
        return (address,)
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM)
    return tuple(sorted({str(TcpAddress(str(place[0]), parsed.port)) for *_, place in found}))


def of_one_family(addresses: Iterable[str]) -> list[str]:
    """Those of IP version 4, or all if there are none.

    A router that has one address of each version is not to be dialled twice.
    """
    found = list(addresses)
    fourth = []
    for address in found:
        parsed = parse_address(address)
        if isinstance(parsed, TcpAddress) and ":" not in parsed.host:
            fourth.append(address)
    return fourth or found
