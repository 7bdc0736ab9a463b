"""A core's news of its prefix cache for the servicer: what is there, once, and then what changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from services.engine.kv import Cleared, KvEvent, KvEventLog, Stored
from services.engine.link import KvChanges, KvContents

# Of one message: 1 MiB.
_NAMES_A_PART: Final = 65_536


class KvNews:
    """Turns the events of a step into one message. It costs nothing until somebody follows.

    The log keeps a bounded number of events. If a step made more, or another one waited long, what is there
    is told anew.
    """

    def __init__(self, log: KvEventLog) -> None:
        self._log = log
        self._followed = False
        # Number of the last event that was told, or covered by contents. None: contents are due.
        self._told: int | None = None

    def follow(self) -> None:
        """Tell the contents with the next news, and from then on what changes."""
        self._followed = True
        self._told = None

    def due(self) -> Iterator[KvContents | KvChanges]:
        """The messages that are to be sent now, if any: after each step."""
        if not self._followed or (self._told is not None and not len(self._log)):
            return
        events = self._log.drain()
        if self._told is None or (events and events[0].sequence_number != self._told + 1):
            yield from self._contents()
        elif (changes := net_changes(events)) is not None:
            yield changes
        self._told = self._log.number

    def _contents(self) -> Iterator[KvContents]:
        names = self._log.names()
        for start in range(0, len(names) or 1, _NAMES_A_PART):
            part = names[start : start + _NAMES_A_PART]
            yield KvContents(b"".join(part), start == 0, start + _NAMES_A_PART >= len(names))


def net_changes(events: list[KvEvent]) -> KvChanges | None:
    """What these events come to; None if to nothing. A block that was stored and given up again is not named.

    Events of one name take turns, so two that follow each other cancel out.
    """
    cleared = False
    net: dict[bytes, bool] = {}
    for event in events:
        if isinstance(event, Cleared):
            cleared = True
            net.clear()
        elif net.pop(event.block_hash, None) is None:
            net[event.block_hash] = isinstance(event, Stored)
    if not net and not cleared:
        return None
    return KvChanges(
        cleared,
        removed=b"".join([name for name, stored in net.items() if not stored]),
        stored=b"".join([name for name, stored in net.items() if stored]),
    )
