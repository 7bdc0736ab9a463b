"""What waits to be sent to one router. Bounded: steps and loads merge, answers hold up the reader."""

from __future__ import annotations

import asyncio
from collections import deque

from catenary.columns import StepRow
from catenary.v1 import common_pb2, engine_pb2
from services.engine.servicer.steps import StepBuffer


class Mailbox:
    """The outbound side of one attachment. `link` names the attachment and is never used twice."""

    def __init__(self, link: int, *, max_answers: int) -> None:
        self.link = link
        self._max_answers = max_answers
        self._steps = StepBuffer()
        self._answers: deque[engine_pb2.AttachRequest] = deque()
        self._load_due = False
        self._first_went = False
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self.closing: str | None = None

    def add_row(self, row: StepRow, *, first: bool = False) -> None:
        """Add news of a sequence to the step in the making; `flush` lets it go. `first`: of that sequence."""
        self._steps.add(row, first=first)

    def flush(self) -> None:
        """A step is complete."""
        if self._steps:
            self._wake.set()

    def refuse(self, handle: int, error: common_pb2.Error) -> None:
        """Answer a submit with a refusal."""
        self._answer(engine_pb2.AttachRequest(refusal=common_pb2.Refusal(handle=handle, error=error)))

    def abort_result(self, handle: int, outcome: common_pb2.AbortOutcome.ValueType) -> None:
        """Answer an abort."""
        result = engine_pb2.AbortResult(handle=handle, outcome=outcome)
        self._answer(engine_pb2.AttachRequest(abort_result=result))

    def request_load(self) -> None:
        """Send a load report as soon as the stream takes it."""
        self._load_due = True
        self._wake.set()

    def close(self, reason: str) -> None:
        """Send what is here, then end the stream."""
        self.closing = self.closing or reason
        self._wake.set()

    async def ready(self) -> None:
        """Wait until there is something to send, or the mailbox is closing."""
        await self._wake.wait()

    async def room(self) -> None:
        """Wait until another command may be read: a router that reads no answers may send no commands."""
        await self._room.wait()

    @property
    def empty(self) -> bool:
        """Whether everything was taken."""
        return not self._steps and not self._answers

    def take(self) -> tuple[list[engine_pb2.AttachRequest], bool]:
        """Everything that waits, the steps first; and whether a load report is due after them. What is first
        of its sequence comes alone, before the rest is put together: there is more to be taken then. The rest
        comes next, whatever else is first of a sequence meanwhile."""
        if self._steps.has_first and not self._first_went:
            self._first_went = True
            return [engine_pb2.AttachRequest(step=self._steps.take())], False
        self._first_went = False
        messages: list[engine_pb2.AttachRequest] = []
        while self._steps:
            messages.append(engine_pb2.AttachRequest(step=self._steps.take()))
        messages.extend(self._answers)
        self._answers.clear()
        self._room.set()
        load_due, self._load_due = self._load_due, False
        if self.closing is None:
            self._wake.clear()
        return messages, load_due

    def _answer(self, message: engine_pb2.AttachRequest) -> None:
        self._answers.append(message)
        if len(self._answers) >= self._max_answers:
            self._room.clear()
        self._wake.set()
