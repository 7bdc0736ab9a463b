"""The addresses behind a name: one service may run several times under it."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from ipaddress import ip_address

from catenary.addresses import TcpAddress, UnixAddress, parse_address


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
    try:
        found = await loop.getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM)
    except UnicodeError:
        # A label that is empty or too long: no name service is asked for it.
        raise OSError(errno.EINVAL, "Not a host name") from None
    return tuple(sorted({str(TcpAddress(str(place[0]), parsed.port)) for *_, place in found}))


@dataclass(slots=True)
class _Turn:
    version: int
    since: float


class AddressFamilies:
    """Of the addresses of a name those of one IP version: a router with one of each is not dialled twice.

    Version 4 comes first. The other version's turn comes when none of those given was connected for
    `patience_s` seconds, and so on in turns.
    """

    def __init__(self, *, patience_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._turns: dict[str, _Turn] = {}

    def choose(self, name: str, addresses: Iterable[str], connected: Collection[str]) -> list[str]:
        """What to dial of the addresses that `name` stands for now, of which some are `connected`."""
        now = self._clock()
        by_version: dict[int, list[str]] = {4: [], 6: []}
        for address in addresses:
            by_version[_version(address)].append(address)
        if not (by_version[4] and by_version[6]):
            self._turns.pop(name, None)
            return by_version[4] or by_version[6]
        turn = self._turns.setdefault(name, _Turn(4, now))
        if any(address in connected for address in by_version[turn.version]):
            turn.since = now
        elif now - turn.since >= self._patience_s:
            turn.version, turn.since = 10 - turn.version, now
        return by_version[turn.version]


def _version(address: str) -> int:
    parsed = parse_address(address)
    return 6 if isinstance(parsed, TcpAddress) and ":" in parsed.host else 4
