"""Runner of batches: each line calls the API inside of this process, without a connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Scope

from catenary.backoff import Backoff
from catenary.telemetry import bind_request, get_logger, new_id, start_span
from gateway.auth import Caller, set_caller
from gateway.batches.files import FileStore
from gateway.batches.job import BatchJob, BatchLine, JobLimits, LineResult
from gateway.batches.store import BatchStore, ClaimedBatch
from gateway.errors import ApiError, bad_request, internal
from gateway.limits.limiter import BEYOND_ITS_KEY, COUNTED, Tried
from gateway.schemas.ignored import ignored_header
from gateway.state.jobs import JobOwner, JobRunner, LeaseLost

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class InnerAnswer:
    """An answer. `retry_after_s` None: without a time to retry. `headers`: those that results repeat."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None
    headers: dict[str, str]


async def call_inside(
    app: ASGIApp, path: str, body: dict[str, Any], *, owner: str, cache_salt: str, tried: Tried
) -> InnerAnswer:
    """POST to `app`. Cancelling it ends the request as a client that hangs up does.

    Args:
        app: the routes behind the limits, without the checks of keys and connections.
        path: the route.
        body: the JSON body.
        owner: the tenant.
        cache_salt: of the owner's cached KV.
        tried: the same one for all attempts at the request.
    """
    data = msgspec.json.encode(body)
    request_id = new_id("req-")
    answer = _Answer()
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))],
        "client": None,
        "server": None,
        COUNTED: tried,
    }
    set_caller(scope, Caller(owner, bulk=True, cache_salt=cache_salt))
    span = start_span(f"batch {path}", None)
    with bind_request(request_id, span.traceparent):
        try:
            await app(scope, _Receive(data), answer)
        except Exception:
            # The framework answers with a 500 and raises the error again.
            _log.exception("request of a batch failed")
            answer.status = answer.status or internal().status
            answer.body = answer.body or bytearray(internal().body())
        finally:
            span.end({"http.response.status_code": answer.status, "catenary.request_id": request_id})
    headers = {name.decode(): value.decode() for name, value in ignored_header(scope)}
    return InnerAnswer(answer.status, request_id, bytes(answer.body), answer.retry_after_s, headers)


class _Receive:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._read = False

    async def __call__(self) -> Message:
        if self._read:
            await asyncio.Event().wait()
        self._read = True
        return {"type": "http.request", "body": self._data, "more_body": False}


class _Answer:
    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self.retry_after_s: float | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.body += message.get("body", b"")
            return
        self.status = message["status"]
        for name, value in message.get("headers", ()):
            if name == b"retry-after-ms":
                self.retry_after_s = int(value) / 1000


_TURN_S = 0.5
_SWEEP_S = 60.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_AWAY = 503
_BUSY = frozenset({408, 429, _AWAY})
_UNKNOWN = 404
_NO_MODEL = b'"model_not_found"'
_LIMITS_AWAY = b'"limits_unavailable"'
_NEVER = f'"{BEYOND_ITS_KEY}"'.encode()
# Attempts at one line that ended with the loss of the model's engines, after which it fails.
_MOST_LOST = 5


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Batches at work, lines of all batches at work, the priority of lines without one, seconds after which
    incomplete uploads are deleted, and seconds after the start for which unknown models are awaited."""

    max_batches: int
    max_lines_at_work: int
    priority: int
    upload_s: float
    model_wait_s: float


class BatchRunner(JobOwner):
    """Runner that claims batches of any gateway with the same store, up to a number at a time."""

    def __init__(
        self,
        batches: BatchStore,
        files: FileStore,
        *,
        limits: RunnerLimits,
        job_limits: JobLimits,
        serves: Callable[[str], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Set it up; `run` does the work.

        Args:
            batches: their store.
            files: the store of their files.
            limits: its own.
            job_limits: those of each batch.
            serves: whether requests for a model can be answered now; "" is the only one that is served.
            clock: Unix time.
        """
        self._batches = batches
        self._files = files
        self._limits = limits
        self._job_limits = job_limits
        self._serves = serves
        self._clock = clock
        self.endpoints: Sequence[str] = ()
        self._places = asyncio.Semaphore(limits.max_lines_at_work)
        self._runner = JobRunner(batches.jobs, self, turn_s=_TURN_S, sweep_s=_SWEEP_S)
        self._running: dict[str, BatchJob] = {}
        self.wake = self._runner.wake
        self._started = time.monotonic()
        self._app: ASGIApp | None = None

    def use(self, app: ASGIApp, endpoints: Sequence[str]) -> None:
        """Set the application that answers lines, and the paths that a batch may be for."""
        self._app, self.endpoints = app, endpoints

    async def run(self) -> None:
        """Work until cancelled; then release all batches as they are."""
        try:
            await self._runner.run()
        finally:
            await self._runner.close()

    def renewed(self, job_id: str, status: str) -> None:
        self._running[job_id].renewed(status)

    def ended(self, job_id: str) -> None:
        del self._running[job_id]
        # There is room for another one.
        self.wake()

    async def claim_more(self) -> None:
        while len(self._runner.running) < self._limits.max_batches:
            claim = await self._batches.claim(self._runner.name, self._runner.running)
            if claim is None:
                return
            _log.info("batch claimed", batch=claim.batch.id, status=claim.batch.status.value)
            job = self._running[claim.batch.id] = BatchJob(
                claim,
                batches=self._batches,
                files=self._files,
                run_line=self._run_line,
                limits=self._job_limits,
                clock=self._clock,
            )
            self._runner.start(job.batch_id, self._run_job(job))

    async def sweep(self) -> None:
        await self._files.sweep(self._limits.upload_s)
        await self._batches.sweep()

    async def _run_job(self, job: BatchJob) -> None:
        try:
            await job.run()
            _log.info("batch ended", batch=job.batch_id)
        except LeaseLost:
            _log.warning("batch taken over by another gateway", batch=job.batch_id)
        except ApiError:
            # The lease runs out, and the batch is claimed again.
            _log.warning("batch left for later: its store does not answer", batch=job.batch_id)
        except Exception:
            _log.exception("batch left for later", batch=job.batch_id)

    async def _run_line(self, claim: ClaimedBatch, line: BatchLine) -> LineResult:
        for name in ("stream", "background"):
            if line.body.get(name):
                error = bad_request(f"'{name}' is not allowed in a batch.", name)
                return LineResult(error.status, new_id("req-"), error.body())
        backoff, lost, tried = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S), 0, Tried()
        while True:
            # A line that waits to be retried holds no place: the limits of its key may delay it.
            async with self._places:
                served = self._serves(str(line.body.get("model") or ""))
                answer = await self._call(claim, line, tried)
            lost += served and answer.status == _AWAY and _LIMITS_AWAY not in answer.body
            if lost >= _MOST_LOST or not self._comes_back(answer):
                return LineResult(answer.status, answer.request_id, answer.body, answer.headers)
            await asyncio.sleep(max(backoff.next_delay(), answer.retry_after_s or 0.0))

    def _comes_back(self, answer: InnerAnswer) -> bool:
        """Return whether a later attempt may have another answer."""
        if answer.status == _UNKNOWN and _NO_MODEL in answer.body:
            # Engines of a fleet that is started as a whole arrive one by one.
            return time.monotonic() - self._started < self._limits.model_wait_s
        return answer.status in _BUSY and _NEVER not in answer.body

    async def _call(self, claim: ClaimedBatch, line: BatchLine, tried: Tried) -> InnerAnswer:
        if self._app is None:
            raise RuntimeError("`use` comes before `run`")
        body = line.body
        if "priority" not in body and "service_tier" not in body:
            body = {**body, "priority": self._limits.priority}
        return await call_inside(
            self._app,
            claim.batch.endpoint,
            body,
            owner=claim.owner,
            cache_salt=claim.cache_salt,
            tried=tried,
        )
