"""The routers that have a lease of this engine, and those among them that want it empty."""

from __future__ import annotations

import asyncio

from services.engine.servicer.mailbox import Mailbox


class AttachedRouters:
    """Mailboxes by link. Also for whom the engine is kept: routers take turns, in the order in which they
    asked, and while one has its turn the others give this engine nothing new. So it empties, however many
    routers there are."""

    def __init__(self) -> None:
        self._ports: dict[int, Mailbox] = {}
        # In the order of their turns.
        self._keepers: dict[int, None] = {}
        self._nobody = asyncio.Event()
        self._nobody.set()

    def __len__(self) -> int:
        return len(self._ports)

    def port(self, link: int | None) -> Mailbox | None:
        """The mailbox of a link, if its router is still there."""
        return None if link is None else self._ports.get(link)

    def join(self, port: Mailbox) -> None:
        """A router granted a lease."""
        self._ports[port.link] = port
        self._nobody.clear()

    def leave(self, port: Mailbox) -> bool:
        """A router is gone. False: it was not here."""
        if self._ports.pop(port.link, None) is None:
            return False
        if not self._ports:
            self._nobody.set()
        self._set_kept(port.link, wanted=False)
        return True

    async def nobody(self) -> None:
        """Wait until no router is attached."""
        await self._nobody.wait()

    def keep(self, port: Mailbox, *, wanted: bool) -> None:
        """A router wants the engine for itself from its next turn on, or no longer. Idempotent."""
        if port.link in self._ports:
            self._set_kept(port.link, wanted=wanted)

    def kept_from(self, link: int) -> bool:
        """Whether this router may give the engine nothing: it is another one's turn."""
        return next(iter(self._keepers), link) != link

    def flush(self) -> None:
        """A step is complete: let it go."""
        for port in self._ports.values():
            port.flush()

    def report(self) -> None:
        """Send everybody a load report now, not with the next interval."""
        for port in self._ports.values():
            port.request_load()

    def close(self, reason: str) -> None:
        """Leave every router, after what waits to be sent."""
        for port in self._ports.values():
            port.close(reason)

    def _set_kept(self, link: int, *, wanted: bool) -> None:
        before = next(iter(self._keepers), None)
        if wanted:
            self._keepers.setdefault(link)
        else:
            self._keepers.pop(link, None)
        if next(iter(self._keepers), None) != before:
            self.report()
