"""Run a plan: wait for the server, send conversations as they are due, and record the answers."""

from __future__ import annotations

import asyncio
import gc
import os
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import msgspec
import uvloop

from catenary_apps.load.answers import Answer
from catenary_apps.load.client import Client, Page
from catenary_apps.load.conversations import Conversation, Prompt, Turn
from catenary_apps.load.plan import LoadPlan
from catenary_apps.load.results import Course, LoadResult, evaluate
from catenary_apps.load.statistics import Record
from catenary_apps.load.target import BenchError, Endpoint, Target

_encode = msgspec.json.Encoder().encode


class Session:
    """The requests of one conversation.

    A chat sends the messages so far, a completion the texts so far, questions and answers in turn.
    """

    def __init__(self, target: Target, model: str, *, strict_lengths: bool) -> None:
        self._target = target
        self._model = model
        self._strict = strict_lengths
        self._messages: list[dict[str, str]] = []
        self._said = ""

    def ask(self, turn: Turn) -> bytes:
        """Return the body of the request for a turn. Raises ValueError for what the route cannot take."""
        fields: dict[str, Any] = {"model": self._model}
        if self._target.endpoint is Endpoint.CHAT:
            if not isinstance(turn.prompt, str):
                raise ValueError("a chat takes text, not token ids")
            self._messages.append({"role": "user", "content": turn.prompt})
            fields["messages"] = self._messages
        else:
            fields["prompt"] = self._prompt(turn.prompt)
        if turn.output_tokens is not None:
            fields["max_tokens"] = turn.output_tokens
            if self._strict:
                fields |= {"min_tokens": turn.output_tokens, "ignore_eos": True}
        fields |= {"stream": True, "stream_options": {"include_usage": True}, **self._target.extra_body}
        return _encode({name: value for name, value in fields.items() if value is not None})

    def answered(self, text: str) -> None:
        """Put the last answer in front of the next question."""
        if self._target.endpoint is Endpoint.CHAT:
            self._messages.append({"role": "assistant", "content": text})
        else:
            self._said += text

    def _prompt(self, prompt: Prompt) -> Prompt:
        if not isinstance(prompt, str):
            if self._said:
                raise ValueError("further turns of a completion take text, not token ids")
            return prompt
        self._said += prompt
        return self._said


_ASK_EACH_S = 0.5
# Also where less of the time is left.
_LEAST_S = 2.0
# What does not pass by waiting: a wrong key, a wrong path.
_FINAL = frozenset(range(400, 500)) - {408, 425, 429}


class _Model(msgspec.Struct):
    id: str
    # Other servers do not say what a model is for.
    tasks: tuple[str, ...] = ("generate",)


class _Models(msgspec.Struct):
    data: list[_Model]


class _NotReady(Exception):
    """Why a server cannot be asked yet. `final`: waiting does not help."""

    def __init__(self, text: str, *, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


async def find_model(client: Client, target: Target, wait_s: float) -> str:
    """Return the model to ask: the target's, or the server's first that generates.

    With `wait_s` the server is asked until it lists it, for so many seconds at the most. Without, a model
    that the target names is not looked up. Raises BenchError.
    """
    if target.model is not None and not wait_s:
        return target.model
    deadline = monotonic() + (wait_s or target.timeout_s)
    while True:
        try:
            by = max(deadline, monotonic() + _LEAST_S)
            return _model_of(await client.get("/v1/models", by), target)
        except _NotReady as error:
            if error.final or not wait_s:
                raise BenchError(str(error)) from None
            left = deadline - monotonic()
            if left <= 0:
                raise BenchError(f"after {wait_s:g} s: {error}") from None
        await asyncio.sleep(min(_ASK_EACH_S, left))


def _model_of(page: Page, target: Target) -> str:
    where, wanted = target.base_url, target.model
    if page.failure == "status":
        if wanted is not None and page.status == 404:
            # It answers, and has no such route.
            return wanted
        text = f"{where} answers {page.status} to GET /v1/models ({page.detail})"
        raise _NotReady(text if wanted is not None else f"{text}: name a model", final=page.status in _FINAL)
    if page.failure is not None:
        raise _NotReady(f"no answer from {where}: {page.detail}")
    try:
        models = msgspec.json.decode(page.content, type=_Models).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _NotReady(f"{where} does not list its models: name one", final=True) from None
    names = [model.id for model in models if "generate" in model.tasks]
    if wanted is not None and wanted not in names:
        raise _NotReady(f"{where} does not list the model {wanted}")
    if not names:
        raise _NotReady(f"{where} lists no model that generates (if it is starting, wait: --ready-timeout-s)")
    return wanted or names[0]


TextCounter = Callable[[str], int | None]
"""The tokens of a text; None: not known."""

_TELL_S = 0.25


@dataclass(slots=True)
class Progress:
    """How far a run is. `total` counts requests; those of conversations that failed are never sent. `waiting`
    is it while the server does not list its model."""

    total: int
    done: int = 0
    failed: int = 0
    running: int = 0
    chunks: int = 0
    warming_up: bool = False
    waiting: bool = False


OnProgress = Callable[[Progress], None]


class LoadInterrupted(KeyboardInterrupt):
    """Ctrl-C ended a run. `result` is what was measured until then, None if no request was over."""

    def __init__(self, result: LoadResult | None) -> None:
        super().__init__()
        self.result = result


def run(
    plan: LoadPlan, *, on_progress: OnProgress | None = None, count_text: TextCounter | None = None
) -> LoadResult:
    """Run `run_load` in a loop of its own, for callers that have none. Raises LoadInterrupted, too."""
    work = _Run(plan, count_text)
    try:
        return uvloop.run(work.whole(on_progress))
    except KeyboardInterrupt:
        raise LoadInterrupted(work.so_far()) from None


async def run_load(
    plan: LoadPlan, *, on_progress: OnProgress | None = None, count_text: TextCounter | None = None
) -> LoadResult:
    """Run a plan to its end.

    Args:
        on_progress: is told a few times a second.
        count_text: counts the tokens of answers from a server that sends no usage.

    Raises:
        BenchError: no server, no model, or no warm-up request that works.
    """
    return await _Run(plan, count_text).whole(on_progress)


@dataclass(slots=True)
class _Run:
    plan: LoadPlan
    count_text: TextCounter | None
    model: str = ""
    records: list[Record] = field(default_factory=list)
    skipped: int = 0
    start: float = 0.0
    used_up: bool = False
    progress: Progress = field(default_factory=lambda: Progress(0, waiting=True))
    # How the part that counts went; None while it has not begun.
    course: Course | None = None
    # Belongs to the loop that runs.
    client: Client = field(init=False)

    async def whole(self, on_progress: OnProgress | None) -> LoadResult:
        plan = self.plan
        self.client = Client(plan.target)
        telling = asyncio.create_task(self._tell(on_progress)) if on_progress is not None else None
        try:
            self.model = await find_model(self.client, plan.target, plan.ready_timeout_s)
            warmup, measured = plan.conversations[: plan.warmup], plan.conversations[plan.warmup :]
            if warmup:
                await self._warm_up(warmup)
            self.progress = Progress(sum(len(one.turns) for one in measured))
            course = await self._measure(measured)
        finally:
            self.client.close()
            if telling is not None:
                telling.cancel()
                with suppress(asyncio.CancelledError):
                    await telling
        if on_progress is not None:
            on_progress(self.progress)
        return evaluate(plan, self.model, self.records, course)

    def so_far(self) -> LoadResult | None:
        """Return the measurements of a run that was broken off."""
        if self.course is None or not self.records:
            return None
        course = replace(self.course, interrupted=True, unfinished=self.progress.running)
        return evaluate(self.plan, self.model, self.records, course)

    async def _measure(self, conversations: Sequence[Conversation]) -> Course:
        plan, frozen = self.plan, _freeze()
        before, resent = os.times(), self.client.resent
        try:
            if plan.arrivals.scheduled:
                await self._open_loop(conversations)
            else:
                places = plan.max_concurrency or len(conversations)
                await self._closed_loop(conversations, places, plan.duration_s)
        finally:
            after, seconds = os.times(), monotonic() - self.start
            if frozen:
                gc.unfreeze()
            cpu_s = after.user - before.user + after.system - before.system
            self.course = course = Course(
                seconds, cpu_s, self.skipped, self.client.resent - resent, self.used_up
            )
        return course

    async def _warm_up(self, conversations: Sequence[Conversation]) -> None:
        """Raise BenchError if nothing works."""
        self.progress = Progress(sum(len(one.turns) for one in conversations), warming_up=True)
        await self._closed_loop(conversations, self.plan.max_concurrency or len(conversations), None)
        if all(record.failure for record in self.records):
            first = self.records[0]
            raise BenchError(f"no request of the warm-up worked: {first.failure}: {first.detail}")
        self.records, self.skipped = [], 0

    async def _open_loop(self, conversations: Sequence[Conversation]) -> None:
        plan = self.plan
        due = plan.arrivals.schedule(len(conversations), plan.seed, plan.duration_s)
        places = None if plan.max_concurrency is None else asyncio.Semaphore(plan.max_concurrency)
        self.progress.total = sum(len(one.turns) for one in conversations[: len(due)])
        self.used_up = plan.duration_s is not None and len(due) == len(conversations)
        self.start = monotonic()
        async with asyncio.TaskGroup() as group:
            for number, (moment, conversation) in enumerate(zip(due, conversations, strict=False)):
                await _until(self.start + moment)
                group.create_task(self._begin(number, conversation, self.start + moment, places))

    async def _closed_loop(
        self, conversations: Sequence[Conversation], places: int, duration_s: float | None
    ) -> None:
        room = asyncio.Semaphore(places)
        self.start = monotonic()

        async def begin(number: int, conversation: Conversation) -> None:
            try:
                await self._converse(number, conversation, None)
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            for number, conversation in enumerate(conversations):
                await room.acquire()
                if duration_s is not None and monotonic() - self.start >= duration_s:
                    return
                group.create_task(begin(number, conversation))
            self.used_up = duration_s is not None

    async def _begin(
        self, number: int, conversation: Conversation, due: float, places: asyncio.Semaphore | None
    ) -> None:
        if places is None:
            await self._converse(number, conversation, due)
            return
        async with places:
            await self._converse(number, conversation, due)

    async def _converse(self, number: int, conversation: Conversation, due: float | None) -> None:
        """Send all turns of a conversation. `due` None: each as soon as it can be sent."""
        session = Session(self.plan.target, self.model, strict_lengths=self.plan.strict_lengths)
        turns, last = conversation.turns, len(conversation.turns) - 1
        for index, turn in enumerate(turns):
            answer = Answer(keeps_text=index < last or self.count_text is not None)
            record = await self._request(session, answer, turn, (number, index), due)
            if record.failure is not None:
                self.skipped += last - index
                return
            if index < last:
                session.answered(answer.text)
                due = monotonic() + self.plan.think_time_s
                if self.plan.think_time_s:
                    await _until(due)

    async def _request(
        self, session: Session, answer: Answer, turn: Turn, place: tuple[int, int], due: float | None
    ) -> Record:
        body = session.ask(turn)
        self.progress.running += 1
        sent = monotonic()
        await self.client.send(body, answer, self._request_id(place))
        record = self._record(answer, turn, place, sent if due is None else due, sent)
        self.progress.running -= 1
        self.progress.done += 1
        self.progress.failed += record.failure is not None
        self.progress.chunks += len(record.moments)
        self.records.append(record)
        return record

    def _record(self, answer: Answer, turn: Turn, place: tuple[int, int], due: float, sent: float) -> Record:
        start, failure, detail = self.start, answer.failure, answer.detail
        tokens = answer.output_tokens
        if tokens is None and self.count_text is not None and failure is None:
            tokens = self.count_text(answer.text)
        wanted = turn.output_tokens
        if self.plan.strict_lengths and failure is None and None not in (tokens, wanted) and tokens != wanted:
            failure, detail = "length", f"{tokens} tokens in place of {wanted}"
        moments = answer.moments or array("d", [answer.ended] if failure is None else [])
        return Record(
            conversation=place[0],
            turn=place[1],
            due_s=due - start,
            sent_s=sent - start,
            ended_s=answer.ended - start,
            moments=array("d", [moment - start for moment in moments]),
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=tokens,
            asked_tokens=wanted,
            failure=failure,
            detail=detail,
            request_id=self._request_id(place),
        )

    def _request_id(self, place: tuple[int, int]) -> str | None:
        prefix = self.plan.target.request_id_prefix
        if prefix is None:
            return None
        return f"{prefix}{'warm-up-' if self.progress.warming_up else ''}{place[0]}-{place[1]}"

    async def _tell(self, on_progress: OnProgress) -> None:
        while True:
            on_progress(self.progress)
            await asyncio.sleep(_TELL_S)


def _freeze() -> bool:
    """Exempt all objects so far from garbage collection, which would delay answers.

    Return False, and do nothing, where the program has done so itself.
    """
    if gc.get_freeze_count():
        return False
    gc.collect()
    gc.freeze()
    return True


async def _until(moment: float) -> None:
    """Sleep until a moment of time.monotonic: the loop's own timers count in whole milliseconds."""
    while (left := moment - monotonic()) > 0:  # noqa: ASYNC110 - it waits for a moment, not for an event
        await asyncio.sleep(left)
