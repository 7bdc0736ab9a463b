"""Copies to the host that the host does not wait for until it needs their data.

The card writes into pinned memory by itself. A copy to pageable memory lands in a buffer of the bridge first,
and moves on at some time after the event that says that the card is done: source BRG, synapse_helpers.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque

import torch

from catenary.telemetry import get_logger
from services.engine.device.hpu.bridge import Event

log = get_logger(__name__)


class PinnedMemory:
    """Pinned host memory, handed out again and again in sizes that are powers of two.

    A buffer is lent from `take` on, until the event behind the copy into it has passed: known at once where
    the copy was waited for (`give`), and asked at a later `take` where it was dropped (`abandon`).
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        # The card may still write to lent memory: it must not be freed.
        self._lent: dict[int, torch.Tensor] = {}
        # In the order of the stream. A copy may be dropped in any thread, in the middle of a `take` too.
        self._abandoned: deque[tuple[torch.Tensor, Event]] = deque()
        self._there = True

    def take(self, count: int) -> torch.Tensor | None:
        """At least `count` bytes, uint8, until they are given back; None where memory cannot be pinned."""
        self._reclaim()
        size = 1 << max(6, (count - 1).bit_length())
        free = self._free[size]
        buffer = free.pop() if free else self._pin(size)
        if buffer is not None:
            self._lent[buffer.data_ptr()] = buffer
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """Takes back a buffer whose copy has ended and was read."""
        del self._lent[buffer.data_ptr()]
        self._free[buffer.numel()].append(buffer)

    def abandon(self, buffer: torch.Tensor, event: Event) -> None:
        """Takes back a buffer whose copy was dropped unread, for use again once `event` has passed."""
        self._abandoned.append((buffer, event))

    def _reclaim(self) -> None:
        while self._abandoned and self._abandoned[0][1].query():
            self.give(self._abandoned.popleft()[0])

    def _pin(self, size: int) -> torch.Tensor | None:
        if not self._there:
            return None
        reason = "is not pinned after all"
        try:
            # The buffer is written to in inference mode and outside of it.
            with torch.inference_mode(False):
                buffer = torch.empty(size, dtype=torch.uint8).pin_memory("hpu")
            if buffer.is_pinned("hpu"):
                return buffer
        except RuntimeError as error:
            reason = " ".join(str(error).split())
        self._there = False
        log.warning("host memory cannot be pinned: each copy to the host is waited for", reason=reason)
        return None


class EventCopy:
    """A copy in the stream's order into lent memory, with an event after it, before which the memory is void.

    The memory goes back to `pinned` after `wait`, or when the copy is dropped without one.
    """

    def __init__(self, host: torch.Tensor, event: Event, pinned: PinnedMemory, memory: torch.Tensor) -> None:
        """`host` is a view of `memory`, which `pinned` lent."""
        self._host = host
        self._event = event
        self._pinned = pinned
        self._memory = memory
        self._result: torch.Tensor | None = None
        self._dropped = weakref.finalize(self, pinned.abandon, memory, event)
        # At the end of the process all memory goes with it.
        self._dropped.atexit = False

    def wait(self) -> torch.Tensor:
        """The tensor on the host, once all of it is there, in memory of its own."""
        if self._result is None:
            self._event.synchronize()
            self._result = self._host.clone()
            self._dropped.detach()
            self._pinned.give(self._memory)
        return self._result
