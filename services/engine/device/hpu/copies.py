"""Copies to the host that the host does not wait for until it needs them."""

from __future__ import annotations

import torch

from services.engine.device.hpu.bridge import Event


class EventCopy:
    """A copy in the stream's order, with an event after it. Until that has passed the host tensor is void."""

    def __init__(self, host: torch.Tensor, event: Event) -> None:
        self._host = host
        self._event = event

    def wait(self) -> torch.Tensor:
        """The tensor on the host, once all of it is there."""
        self._event.synchronize()
        return self._host
