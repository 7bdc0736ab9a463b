"""Copies to the host that the host does not wait for until it needs them.

The card writes into pinned memory by itself. What is copied to other memory lands in a buffer of the bridge
first, and moves on at some time after the event that says that the card is done: source BRG, synapse_helpers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch

from catenary.telemetry import get_logger
from services.engine.device.hpu.bridge import Event

log = get_logger(__name__)


class PinnedMemory:
    """Pinned host memory, handed out again and again in sizes that are powers of two."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        # Memory that the card may be writing to is not to be freed.
        self._lent: dict[int, torch.Tensor] = {}
        self._there = True

    def take(self, count: int) -> torch.Tensor | None:
        """At least `count` bytes, uint8, until they are given back; None where memory cannot be pinned."""
        size = 1 << max(6, (count - 1).bit_length())
        free = self._free[size]
        buffer = free.pop() if free else self._pin(size)
        if buffer is not None:
            self._lent[buffer.data_ptr()] = buffer
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """Takes back what nobody reads or writes any more."""
        del self._lent[buffer.data_ptr()]
        self._free[buffer.numel()].append(buffer)

    def _pin(self, size: int) -> torch.Tensor | None:
        if not self._there:
            return None
        reason = "is not pinned after all"
        try:
            # Written to in inference mode and outside of it.
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
    """A copy in the stream's order, with an event after it. Until that has passed the memory is void."""

    def __init__(self, host: torch.Tensor, event: Event, done: Callable[[], None]) -> None:
        self._host = host
        self._event = event
        self._done = done
        self._result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """The tensor on the host, once all of it is there, in memory of its own."""
        if self._result is None:
            self._event.synchronize()
            self._result = self._host.clone()
            self._done()
        return self._result
