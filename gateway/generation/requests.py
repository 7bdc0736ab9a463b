"""Requests at work: the slot, the deadline, the client and the counts of each, whatever its API."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Collection, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from starlette.requests import Request

from catenary.telemetry import get_logger
from catenary.v1 import common_pb2
from gateway.auth import Caller, caller_of
from gateway.config import GatewayConfig
from gateway.errors import bad_request, overloaded, unavailable
from gateway.http.answers import Call
from gateway.http.request import BodyLimits, ClientGone, ClientWatch, read_json_object
from gateway.link.inbox import Session
from gateway.metrics import GatewayMetrics, RequestTimer
from gateway.schemas.base import RequestLimits
from gateway.schemas.generation import GenerationFields
from gateway.schemas.pooling import PooledFields
from gateway.text.models import Model, ModelRegistry

_log = get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QueuePriority:
    """Queueing fields of a request, copied into each of its sequences."""

    priority: int = 0
    priority_class: common_pb2.PriorityClass.ValueType = common_pb2.PRIORITY_CLASS_UNSPECIFIED
    tenant: str = ""
    session_id: str = ""
    max_wait_ms: int | None = None

    def enter(self, spec: common_pb2.SequenceSpec) -> None:
        if self.priority:
            spec.priority = self.priority
        spec.priority_class = self.priority_class
        if self.tenant:
            spec.tenant = self.tenant
        if self.session_id:
            spec.session_id = self.session_id
        if self.max_wait_ms is not None:
            spec.max_wait_ms = self.max_wait_ms


@dataclass(frozen=True, slots=True)
class Priorities:
    """Priority numbers of the service tiers; lower ones are computed first, and a request without a tier has
    0.

    `max_wait_ms`: longest wait of a request that names none; None: the router's."""

    priority: int
    flex: int
    max_wait_ms: int | None = None

    def of(self, number: int | None, tier: str | None) -> int:
        """Return a request's own number, else its tier's."""
        if number is not None:
            return number
        return {"priority": self.priority, "flex": self.flex}.get(tier or "", 0)

    def queue_priority(
        self, caller: Caller, number: int | None, tier: str | None = None, session: str | None = None
    ) -> QueuePriority:
        """Return the queue priority of a request of `caller`.

        Its class is that of its header; else BULK in a batch; else by its number: INTERACTIVE below 0,
        DEFAULT at 0, BULK above. `session`: the session that its body names; the header takes precedence."""
        own = self.of(number, tier)
        return QueuePriority(
            priority=own,
            priority_class=_class(caller, own),
            tenant=caller.owner,
            session_id=_session(caller, session),
            max_wait_ms=self.max_wait_ms if caller.max_wait_ms is None else caller.max_wait_ms,
        )


def _class(caller: Caller, priority: int) -> common_pb2.PriorityClass.ValueType:
    if caller.priority_class != common_pb2.PRIORITY_CLASS_UNSPECIFIED:
        return caller.priority_class
    if caller.bulk or priority > 0:
        return common_pb2.PRIORITY_CLASS_BULK
    return common_pb2.PRIORITY_CLASS_INTERACTIVE if priority < 0 else common_pb2.PRIORITY_CLASS_DEFAULT


def _session(caller: Caller, session: str | None) -> str:
    """Return a session name of bounded length; that of one tenant never equals another's."""
    named = caller.session_id or session
    if not named:
        return ""
    return hashlib.blake2b(f"{caller.owner}\n{named}".encode(), digest_size=16, person=b"session").hexdigest()


class Interruptible(Protocol):
    def interrupt(self, error: Exception) -> None:
        """Make it raise `error`."""


class Requests:
    """Requests at work, at most `max_requests`."""

    def __init__(
        self, config: GatewayConfig, *, session: Session, models: ModelRegistry, metrics: GatewayMetrics
    ) -> None:
        self._max_requests = config.max_requests
        self._timeout_s = config.request_timeout_s
        self._session = session
        self._metrics = metrics
        self._interruptible: set[Interruptible] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._count = 0
        self.models = models
        self.body_limits = BodyLimits(
            int(config.max_body_mib * (1 << 20)), config.max_body_values, config.body_timeout_s
        )
        self.limits = RequestLimits(
            **{limit.name: getattr(config, limit.name) for limit in dataclasses.fields(RequestLimits)}
        )
        self.priorities = Priorities(
            config.priority_tier,
            config.flex_tier,
            None if config.max_wait_s is None else round(config.max_wait_s * 1000),
        )
        self.draining = False
        """Whether new requests are refused."""

    def __len__(self) -> int:
        return self._count

    def active(self, call: Call) -> ActiveRequest:
        """Return a request whose client waits for the answer, to be entered."""
        return ActiveRequest(self, caller_of(call.scope), call)

    def detached(self, caller: Caller, *, deadline: float | None = None) -> ActiveRequest:
        """Return a request without a waiting client, to be entered. `deadline`: None: as of a new one."""
        return ActiveRequest(self, caller, None, deadline)

    def deadline(self) -> float:
        """Return the loop's time at which a request that begins now is given up."""
        return asyncio.get_running_loop().time() + self._timeout_s

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, wait for those at work, and end with an error those left after `grace_s`."""
        self.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            _log.warning("requests cut off by the shutdown", requests=self._count, after_s=grace_s)
            for work in list(self._interruptible):
                work.interrupt(unavailable("The server is shutting down."))

    def enter(self) -> None:
        """Take a slot. Raises ApiError: the server is stopping (503), or all slots are taken (429)."""
        if self.draining:
            raise unavailable("The server is shutting down.")
        if self._count >= self._max_requests:
            raise overloaded(f"The server is working on its limit of {self._max_requests} requests.")
        self._count += 1
        self._idle.clear()

    def leave(self) -> None:
        self._count -= 1
        if not self._count:
            self._idle.set()

    def timer(self, model: Model) -> RequestTimer:
        """Start the metrics of a request."""
        return RequestTimer(self._metrics, model.name)

    def check_load(self, model: Model, priority: QueuePriority) -> None:
        """Raise ApiError 429 if the routers shed requests of this kind."""
        self._session.check(model.name, priority.priority_class, priority.tenant)

    @contextmanager
    def interrupting(self, work: Interruptible) -> Iterator[None]:
        """Interrupt `work` if it is still inside when the grace period of `drain` is over."""
        self._interruptible.add(work)
        try:
            yield
        finally:
            self._interruptible.discard(work)


class ActiveRequest:
    """Request from its first byte to the end of its answer, as an async context manager.

    Entering takes a slot; leaving releases it, and counts an error once the request was admitted."""

    __slots__ = ("_call", "_requests", "_timer", "_watch", "caller", "deadline", "priority")

    def __init__(
        self, requests: Requests, caller: Caller, call: Call | None, deadline: float | None = None
    ) -> None:
        self._requests = requests
        self._call = call
        self._watch: ClientWatch | None = None
        self._timer: RequestTimer | None = None
        self.caller = caller
        self.deadline = requests.deadline() if deadline is None else deadline
        """Loop's time at which it is given up."""
        self.priority = QueuePriority()
        """Queue priority, once admitted."""

    async def __aenter__(self) -> Self:
        """Take a slot. Raises ApiError: 429, 503."""
        self._requests.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._timer is not None and error is not None:
                self._timer.raised(error)
            if self._watch is not None:
                await self._watch.close()
        finally:
            self._requests.leave()

    @property
    def call(self) -> Call:
        """HTTP call to answer. Raises RuntimeError if no client waits."""
        if self._call is None:
            raise RuntimeError("no client waits for this request")
        return self._call

    @property
    def timer(self) -> RequestTimer:
        """Metrics of the request. Raises RuntimeError before it was admitted."""
        if self._timer is None:
            raise RuntimeError("the request was not admitted")
        return self._timer

    async def json_object(self) -> dict[str, Any]:
        """Read the body, and watch the client from then on. Raises ApiError, or ClientGone."""
        call = self.call
        body = await read_json_object(Request(call.scope, call.receive), self._requests.body_limits)
        self._watch = ClientWatch(call.receive)
        self._watch.start()
        return body

    async def body(self) -> dict[str, Any]:
        """Read the body of a request to a model, and fill in the model if only one is served.

        Raises ApiError, or ClientGone."""
        body = await self.json_object()
        if body.get("model") in (None, ""):
            body["model"] = self._requests.models.only()
            if body["model"] is None:
                raise bad_request(
                    "Missing required parameter: 'model', as several are served.",
                    "model",
                    "missing_required_parameter",
                )
        return body

    def admit(self, fields: GenerationFields | PooledFields, tasks: Collection[int] = ()) -> Model:
        """Find the model, start the metrics, and set the priority. `tasks`: empty: to generate.

        Raises ApiError: no such model for any of `tasks` (404, 400), none is served (503), load is shed
        (429)."""
        models = self._requests.models
        model = models.require(fields.model, tasks) if tasks else models.require(fields.model)
        self._timer = self._requests.timer(model)
        tier = session = None
        if isinstance(fields, GenerationFields):
            tier, session = fields.service_tier, fields.prompt_cache_key or fields.user
        self.priority = self._requests.priorities.queue_priority(self.caller, fields.priority, tier, session)
        self._requests.check_load(model, self.priority)
        return model

    async def until_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`; cancel it and raise ClientGone if the client hangs up first."""
        return await (work if self._watch is None else self._watch.run(work))

    @contextmanager
    def interrupting(self, work: Interruptible) -> Iterator[None]:
        """Interrupt `work` if the client hangs up, or the gateway stops, while it is inside."""
        if self._watch is not None:
            self._watch.on_gone(lambda: work.interrupt(ClientGone()))
        with self._requests.interrupting(work):
            yield
