"""What services dial for life: addresses as configured, and whatever the names among them stand for now."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from catenary.rpc.resolving import AddressFamilies, is_name, resolve
from catenary.telemetry import get_logger

_log = get_logger(__name__)
_LOOK_UP_S = 5.0
_LOOK_UP_ALONE_S = 1.0


class NamedAddresses:
    """`literal` are those without a name; `names` are to be looked up again and again."""

    def __init__(
        self, addresses: Sequence[str], look_up: Callable[[str], Awaitable[Sequence[str]]] = resolve
    ) -> None:
        """Raises ValueError for what is not an address."""
        self.literal = tuple(address for address in addresses if not is_name(address))
        self.names = tuple(address for address in addresses if is_name(address))
        self._look_up = look_up
        self._families = AddressFamilies()

    def pause_s(self, *, connected: bool) -> float:
        """Until names are looked up next; sooner while nobody is connected."""
        return _LOOK_UP_S if connected else _LOOK_UP_ALONE_S

    async def wanted(self, known: Mapping[str, bool]) -> dict[str, str]:
        """What there is to dial now, each with the name or address that led to it.

        `known`: what is dialled, and whether it is connected. Nobody is dropped for a name service that is
        away: all of them are wanted then.
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
