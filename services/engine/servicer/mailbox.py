"""Routers that are attached: their turns, and what waits for each, merged where a router reads slowly."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterator

from catenary.columns import StepRow, split_columns, take_message
from catenary.telemetry import get_logger
from catenary.v1 import common_pb2, engine_pb2
from services.engine.domain import CoreErrorCode, FinishReason
from services.engine.link import EndRow, HypothesisRow, OfferedKv, StepColumns

log = get_logger(__name__)


def _hypothesis_of(row: HypothesisRow) -> common_pb2.Hypothesis:
    """A hypothesis as it is sent."""
    message = common_pb2.Hypothesis(
        token_ids=row.token_ids,
        score=row.score,
        reason=(
            common_pb2.FINISH_REASON_STOP
            if row.reason is FinishReason.STOP
            else common_pb2.FINISH_REASON_LENGTH
        ),
        stop_token_id=row.stop_token_id,
    )
    if row.sampled is not None:
        columns = common_pb2.LogprobColumns(
            rows=[0],
            sampled=row.sampled,
            top_counts=row.top_counts,
            top_ids=row.top_ids,
            top_logprobs=row.top_logprobs,
        )
        message.logprobs.CopyFrom(columns)
    return message


def _offer_message(offer: OfferedKv) -> common_pb2.KvOffer:
    """The core's offer in the contract's words."""
    return common_pb2.KvOffer(
        connector=offer.connector,
        address=offer.address,
        ticket=offer.ticket,
        host_id=offer.host_id,
        blocks=offer.blocks,
        tokens=offer.tokens,
        layout=offer.layout,
    )


_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}


def rows_of(columns: StepColumns) -> Iterator[StepRow]:
    """The rows of a core's step; their handles are the core's keys."""
    ends = {end.row: _end_of(end) for end in columns.ends}
    return split_columns(
        columns.keys,
        columns.token_counts,
        columns.token_ids,
        columns.logprob_rows,
        columns,
        ends,
        columns.prompts,
    )


def _end_of(end: EndRow) -> common_pb2.SequenceEnd:
    message = common_pb2.SequenceEnd(
        reason=_REASONS[end.reason],
        usage=common_pb2.Usage(
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            completion_tokens=end.completion_tokens,
            transferred_tokens=end.transferred_tokens,
        ),
        stop_token_id=end.stop_token_id,
        vector=end.vector,
        hypotheses=map(_hypothesis_of, end.hypotheses),
        kv_offer=None if end.kv_offer is None else _offer_message(end.kv_offer),
    )
    if message.reason == common_pb2.FINISH_REASON_ERROR:
        code = end.error_code or CoreErrorCode.INTERNAL
        message.error.code = common_pb2.ErrorCode.Value(f"ERROR_CODE_{code}")
        message.error.message = end.error_message or "The engine failed this sequence."
        if end.error_param is not None:
            message.error.param = end.error_param
        message.error.retryable = code in (CoreErrorCode.OVERLOADED, CoreErrorCode.INTERNAL)
    return message


class StepBuffer:
    """Rows that a router has not been sent yet. Rows of later steps merge into those of earlier ones. What is
    the first of its sequence goes before the others, in a message of its own: somebody waits for it, and all
    rows of a step take longer than one.

    Its size is bounded by the tokens of the sequences that are live: a row ends its sequence at the latest at
    the model's context.
    """

    def __init__(self) -> None:
        self._rows: dict[int, StepRow] = {}
        self._first_rows: dict[int, StepRow] = {}

    def __bool__(self) -> bool:
        return bool(self._rows or self._first_rows)

    @property
    def has_first(self) -> bool:
        """Whether the next message is one of first rows."""
        return bool(self._first_rows)

    def add(self, row: StepRow, *, first: bool = False) -> None:
        """Append news of the handle that the row names. `first`: nothing of it was added before."""
        held = self._first_rows.get(row.handle) or self._rows.get(row.handle)
        if held is not None:
            held.append(row)
            held.end = row.end or held.end
        elif first:
            self._first_rows[row.handle] = row
        else:
            self._rows[row.handle] = row

    def take(self) -> common_pb2.StepOutput:
        """The next message: all rows of one kind, or as many as one of moderate size holds."""
        return take_message(self._first_rows or self._rows)


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


class AttachedRouters:
    """Mailboxes by link. Also for whom the engine is kept: routers take turns, in the order in which they
    asked, and while one has its turn the others give this engine nothing new. So it empties, however many
    routers there are.

    `kept_limit_s` bounds a turn, so that a router which forgets to give back closes it to nobody for ever.
    """

    def __init__(self, *, kept_limit_s: float = math.inf) -> None:
        self._kept_limit_s = kept_limit_s
        self._ports: dict[int, Mailbox] = {}
        # Instance ids, for logs.
        self._names: dict[int, str] = {}
        # In the order of their turns.
        self._keepers: dict[int, None] = {}
        # When this turn was first looked at.
        self._turn_since: float | None = None
        self._nobody = asyncio.Event()
        self._nobody.set()
        # Links whose routers know that the engine takes nothing new.
        self._aware: set[int] = set()
        self._left_or_aware = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ports)

    def port(self, link: int | None) -> Mailbox | None:
        """The mailbox of a link, if its router is still there."""
        return None if link is None else self._ports.get(link)

    def join(self, port: Mailbox, router: str) -> None:
        """A router granted a lease; `router` is its instance id."""
        self._ports[port.link] = port
        self._names[port.link] = router
        self._nobody.clear()

    def leave(self, port: Mailbox) -> bool:
        """A router is gone. False: it was not here."""
        if self._ports.pop(port.link, None) is None:
            return False
        del self._names[port.link]
        self._aware.discard(port.link)
        self._left_or_aware.set()
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

    def end_long_turn(self, now: float) -> None:
        """To be called now and then, with steady seconds: a turn that lasts too long is over, if there are
        other routers. Whoever had it comes last of those that wait for theirs; if none does, it has to ask
        anew."""
        link = next(iter(self._keepers), None)
        if link is None:
            return
        if self._turn_since is None:
            self._turn_since = now
        if now - self._turn_since < self._kept_limit_s or len(self._ports) < 2:
            return
        waiting = len(self._keepers) - 1
        log.warning(
            "a router kept the engine from the others for too long: its turn is over",
            router=self._names[link],
            kept_limit_s=self._kept_limit_s,
            waiting=waiting,
        )
        self._set_kept(link, wanted=False)
        if waiting:
            self._set_kept(link, wanted=True)

    def knows_of_drain(self, port: Mailbox) -> None:
        """Its router has answered a report that says DRAINING: what it sends from now on was on its way."""
        self._aware.add(port.link)
        self._left_or_aware.set()

    async def all_know_of_drain(self) -> None:
        """Wait until each router that is here has. A sequence that comes when the stream has ended is lost
        instead of refused, and counts as a death."""
        while self._ports.keys() - self._aware:
            self._left_or_aware.clear()
            await self._left_or_aware.wait()

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
            self._turn_since = None
            self.report()
