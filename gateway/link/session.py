"""Where the gateway's sequences go, as the rest of the gateway sees it."""

from __future__ import annotations

from typing import Protocol

from catenary.v1 import common_pb2
from gateway.link.inbox import SequenceFeed


class Session(Protocol):
    """Takes sequences and sees each through to its end, whatever engines and routers do meanwhile.
    Implemented by `Routers`; neither method waits."""

    def check(self, model: str, priority_class: common_pb2.PriorityClass.ValueType, tenant: str) -> None:
        """Raises ApiError if such a sequence would be refused now: asking first saves the rendering."""

    def submit(
        self, spec: common_pb2.SequenceSpec, feed: SequenceFeed, same_prompt_as: int | None = None
    ) -> int:
        """Send a sequence off; its output goes to `feed`. Returns its handle.

        `spec` is kept. `same_prompt_as` is the handle of another sequence with the same prompt; the token ids
        are then taken out of `spec`. Raises ApiError.
        """

    def abort(self, handle: int) -> None:
        """Give a sequence up. Its output is not looked at any more. Idempotent."""
