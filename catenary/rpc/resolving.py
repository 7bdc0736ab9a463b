"""Resolve the names among configured addresses, again and again: several replicas may stand under one."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from catenary.addresses import TcpAddress, UnixAddress, parse_address
from catenary.telemetry import get_logger


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
    """Return the addresses that `host:port` stands for now, in a stable order; an address itself if it has
    no name.

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
        """Return the addresses to dial of those that `name` stands for now, of which some are `connected`."""
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


_log = get_logger(__name__)
_LOOK_UP_S = 5.0
_LOOK_UP_ALONE_S = 1.0


class NamedAddresses:
    """`literal` are those without a name; `names` are to be looked up again and again."""

    def __init__(
        self, addresses: Sequence[str], look_up: Callable[[str], Awaitable[Sequence[str]]] = resolve
    ) -> None:
        """Raise ValueError for what is not an address."""
        self.literal = tuple(address for address in addresses if not is_name(address))
        self.names = tuple(address for address in addresses if is_name(address))
        self._look_up = look_up
        self._families = AddressFamilies()

    def pause_s(self, *, connected: bool) -> float:
        """Return the seconds until names are looked up next; fewer while none is connected."""
        return _LOOK_UP_S if connected else _LOOK_UP_ALONE_S

    async def wanted(self, known: Mapping[str, bool]) -> dict[str, str]:
        """Return the addresses to dial now, each with the name or address that led to it.

        `known`: addresses that are dialled, and whether each is connected. While a name service is away, all
        of them stay wanted.
        """
        wanted = {address: address for address in self.literal}
        connected = {address for address, is_connected in known.items() if is_connected}
        for name in self.names:
            try:
                found = self._families.choose(name, await self._look_up(name), connected)
            except OSError as error:
                _log.debug("name not resolved", name=name, reason=error.strerror or "unknown")
                found = list(known)
            wanted = dict.fromkeys(found, name) | wanted
        return wanted
