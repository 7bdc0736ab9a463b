"""A bounded pool of worker processes, with a time limit for each task.

Of the tasks that wait, tenants take turns, and long tasks never take the last worker.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

import services
from catenary.backoff import Backoff
from catenary.frames import AsyncFrames, LinkClosed
from catenary.memory import MemoryWatch
from catenary.runtime import module_command
from catenary.telemetry import get_logger
from services.tokenizer.rendering import ModelFilesError
from services.tokenizer.workers.messages import (
    Answer,
    ChatTask,
    ConstraintTask,
    Greeting,
    Task,
    WorkerFailed,
    WorkerReady,
    WorkerSetup,
    framed,
)

W = TypeVar("W")


class Waiting(Generic[W]):
    """A task that waits. `size`: bytes of its texts. `long`: it may hold a worker for long. `what`: the
    owner's, to tell it of its turn."""

    __slots__ = ("long", "size", "tenant", "what")

    def __init__(self, tenant: str, size: int, what: W, *, long: bool) -> None:
        self.tenant = tenant
        self.size = size
        self.long = long
        self.what = what


class Turns(Generic[W]):
    """Two lanes, one of long tasks. In each, tenants take turns, and a tenant's tasks keep their order.

    `most` tasks wait, of `most_bytes` together. Where there are more, the tenant that has most of them loses
    its last one: a tenant that fills the queue leaves room for others.
    """

    def __init__(self, *, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._lanes: dict[bool, OrderedDict[str, deque[Waiting[W]]]] = {
            False: OrderedDict(),
            True: OrderedDict(),
        }
        self._tasks: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._last_long = False

    def __len__(self) -> int:
        return self._tasks.total()

    def add(self, waiting: Waiting[W]) -> None:
        """Let a task wait behind those of its tenant."""
        self._lanes[waiting.long].setdefault(waiting.tenant, deque()).append(waiting)
        self._tasks[waiting.tenant] += 1
        self._bytes[waiting.tenant] += waiting.size

    def next(self, *, long: bool) -> Waiting[W] | None:
        """Take the task whose turn it is; without `long` none of those. Lanes alternate where both wait."""
        order = (False, True) if self._last_long else (True, False)
        for lane in order:
            if self._lanes[lane] and (long or not lane):
                tenant, row = next(iter(self._lanes[lane].items()))
                self._lanes[lane].move_to_end(tenant)
                waiting = row[0]
                self.remove(waiting)
                self._last_long = lane
                return waiting
        return None

    def remove(self, waiting: Waiting[W]) -> None:
        """Remove a task that waits."""
        lane = self._lanes[waiting.long]
        row = lane[waiting.tenant]
        row.remove(waiting)
        if not row:
            del lane[waiting.tenant]
        self._tasks[waiting.tenant] -= 1
        self._bytes[waiting.tenant] -= waiting.size
        if not self._tasks[waiting.tenant]:
            del self._tasks[waiting.tenant], self._bytes[waiting.tenant]

    def surplus(self, newest: Waiting[W]) -> Waiting[W] | None:
        """Take the task that has to go, now that `newest` has come; None: there is room for all."""
        if len(self) > self._most:
            held = self._tasks
        elif self._bytes.total() > self._most_bytes:
            held = self._bytes
        else:
            return None
        most = max(held.values())
        tenant = newest.tenant if held[newest.tenant] == most else max(held, key=lambda name: held[name])
        lanes = [self._lanes[lane][tenant] for lane in (True, False) if tenant in self._lanes[lane]]
        waiting = newest if tenant == newest.tenant else lanes[0][-1]
        self.remove(waiting)
        return waiting


# All that a worker may see of the service's environment: no secret is among it.
_ENVIRONMENT = [
    "PATH",
    "PYTHONPATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TZ",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "TMPDIR",
]

# A process whose link is closed is about to end.
_EXIT_GRACE_S = 1.0


class WorkerLost(Exception):
    """The process ended, crashed or was killed. The text continues a sentence about why, if that is known."""


class WorkerProcess:
    """A started worker. It does one task at a time; when one is given up, the process must be killed."""

    def __init__(self, process: asyncio.subprocess.Process, frames: AsyncFrames) -> None:
        self._process = process
        self._frames = frames
        self._answers = msgspec.msgpack.Decoder(Answer)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @classmethod
    async def start(cls, setup: WorkerSetup) -> tuple[WorkerProcess, WorkerReady]:
        """Spawn a worker, hand it its setup, wait until it has loaded.

        Raises ModelFilesError if the files are at fault, WorkerLost if the process died.
        """
        memory = MemoryWatch()
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(*module_command("services.tokenizer.workers"), "--link-fd", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                env=_environment(),
                # Ctrl-C on the terminal is for the service: it lets running tasks finish.
                start_new_session=True,
            )
        worker = cls(process, await AsyncFrames.over(ours))
        try:
            greeting = await worker._greet(setup)
        except WorkerLost:
            raise WorkerLost(memory.explain(await worker._end_status())) from None
        except BaseException:
            await asyncio.shield(worker.kill())
            raise
        if isinstance(greeting, WorkerFailed):
            await worker.kill()
            raise ModelFilesError(greeting.reason)
        return worker, greeting

    async def run(self, task: Task) -> Answer:
        """Return the worker's answer. Raises WorkerLost."""
        try:
            await self._frames.send(framed(task))
            answer: Answer = self._answers.decode(await self._frames.receive())
            return answer
        except (LinkClosed, msgspec.MsgspecError):
            # A worker that sends no valid answer is broken; the pool sees the end of the process.
            await self.kill()
            raise WorkerLost from None

    async def ended(self) -> None:
        """Return when the process has ended."""
        await self._process.wait()

    async def kill(self) -> None:
        """End the process at once and wait until it is gone."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._frames.abort()
        await self._process.wait()

    async def _end_status(self) -> int:
        """Return the exit status of a process whose link is closed. Kills one that does not end by itself."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _EXIT_GRACE_S)
        await asyncio.shield(self.kill())
        return self._process.returncode or 0

    async def _greet(self, setup: WorkerSetup) -> Greeting:
        try:
            await self._frames.send(framed(setup))
            greeting: Greeting = msgspec.msgpack.decode(await self._frames.receive(), type=Greeting)
            return greeting
        except LinkClosed:
            raise WorkerLost from None


def _environment() -> dict[str, str]:
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    root = str(Path(str(services.__file__)).parent.parent)
    # Processes are the parallelism; threads inside of one would only fight for the same cores.
    return environment | {"PYTHONPATH": root, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}


# A task whose caller is gone may end by itself: to start a worker costs more than most tasks take.
_ABANDONED_GRACE_S = 0.2
_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 0.2, 10.0

_log = get_logger(__name__)


class PoolFull(Exception):
    """The queue is full, or its tenant's part of it, or a task waited in it too long."""


class TaskTimeout(Exception):
    """A task ran over its limit; its worker was killed."""


class TaskCrashed(Exception):
    """The worker died with the task."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """`short_bytes`: of a task's texts, beyond which it is long. `queue`: tasks that wait for a worker;
    `queue_bytes`: their texts together. Times in seconds."""

    workers: int
    short_bytes: int
    queue: int
    queue_bytes: int
    queue_timeout_s: float
    task_timeout_s: float
    start_timeout_s: float


class WorkerPool:
    """Runs tasks on workers. One event loop; no locks.

    Tenants take turns, see Turns. Long tasks, those with much text, constraints, and chats with a template of
    their own, leave one worker to the others, where there are several.

    `on_change` is called whenever the number of waiting tasks or of live workers has changed.
    """

    def __init__(self, setup: WorkerSetup, limits: PoolLimits, *, on_change: Callable[[], None]) -> None:
        self._setup = setup
        self._limits = limits
        self._on_change = on_change
        self._idle: deque[WorkerProcess] = deque()
        self._workers: set[WorkerProcess] = set()
        # Those that have a long task.
        self._busy_long: set[WorkerProcess] = set()
        self._turns: Turns[asyncio.Future[WorkerProcess]] = Turns(
            most=limits.queue, most_bytes=limits.queue_bytes
        )
        self._background: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """Tasks that wait for a worker."""
        return len(self._turns)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the live workers."""
        return tuple(worker.pid for worker in self._workers)

    async def start(self) -> WorkerReady:
        """Start all workers. Raises ModelFilesError if they cannot load the files, or not in time."""
        try:
            async with asyncio.TaskGroup() as group:
                starts = [group.create_task(self._start_worker()) for _ in range(self._limits.workers)]
        except BaseExceptionGroup as failures:
            await self.stop()
            raise _start_failure(failures) from None
        return starts[0].result()

    async def run(self, task: Task, *, size: int, tenant: str = "", timeout_s: float | None = None) -> Answer:
        """Return the answer to `task`, whose texts have `size` bytes. `timeout_s`: in place of the limits'
        one.

        Raises PoolFull, TaskTimeout or TaskCrashed. If cancelled, the task's place or worker is freed.
        """
        worker = await self._acquire(tenant, size, long=self._is_long(task, size))
        running = asyncio.create_task(worker.run(task))
        try:
            done, _ = await asyncio.wait({running}, timeout=timeout_s or self._limits.task_timeout_s)
        except asyncio.CancelledError:
            self._in_background(self._abandon(worker, running, grace_s=_ABANDONED_GRACE_S))
            raise
        if not done:
            self._in_background(self._abandon(worker, running, grace_s=0))
            raise TaskTimeout
        try:
            answer = running.result()
        except WorkerLost:
            raise TaskCrashed from None
        self._free(worker)
        return answer

    async def stop(self) -> None:
        """Kill the workers. Tasks that still run end with TaskCrashed."""
        background = tuple(self._background)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in self._workers))
        self._workers.clear()

    def _is_long(self, task: Task, size: int) -> bool:
        if isinstance(task, ChatTask) and task.options.chat_template is not None:
            return True
        return isinstance(task, ConstraintTask) or size > self._limits.short_bytes

    async def _acquire(self, tenant: str, size: int, *, long: bool) -> WorkerProcess:
        turn: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        waiting = Waiting(tenant, size, turn, long=long)
        self._turns.add(waiting)
        self._hand_out()
        if turn.done():
            return turn.result()
        while (surplus := self._turns.surplus(waiting)) is not None:
            surplus.what.set_exception(PoolFull())
            if surplus is waiting:
                break
        self._on_change()
        try:
            async with asyncio.timeout(self._limits.queue_timeout_s):
                # Shielded: a turn that has come is to be given back, not lost.
                return await asyncio.shield(turn)
        except (TimeoutError, asyncio.CancelledError) as reason:
            if not turn.done():
                self._turns.remove(waiting)
                turn.cancel()
            elif not turn.cancelled() and turn.exception() is None:
                self._free(turn.result())
            if isinstance(reason, asyncio.CancelledError):
                raise
            raise PoolFull from None
        finally:
            self._on_change()

    def _hand_out(self) -> None:
        """Give idle workers to the tasks whose turn it is."""
        most_long = max(1, self._limits.workers - 1)
        while True:
            # Those that died while they were idle are replaced.
            while self._idle and self._idle[0] not in self._workers:
                self._idle.popleft()
            if not self._idle:
                return
            waiting = self._turns.next(long=len(self._busy_long) < most_long)
            if waiting is None:
                return
            worker = self._idle.popleft()
            if waiting.long:
                self._busy_long.add(worker)
            waiting.what.set_result(worker)

    def _free(self, worker: WorkerProcess) -> None:
        """Take a worker back that has done its task."""
        self._busy_long.discard(worker)
        self._idle.append(worker)
        self._hand_out()

    async def _abandon(self, worker: WorkerProcess, running: asyncio.Task[Answer], *, grace_s: float) -> None:
        """Free a worker from a task whose caller is gone."""
        done, _ = await asyncio.wait({running}, timeout=grace_s)
        if not done:
            await worker.kill()
        with suppress(WorkerLost):
            await running
            self._free(worker)

    async def _watch(self, worker: WorkerProcess) -> None:
        """Replace a worker when its process has ended, whatever the reason."""
        await worker.ended()
        self._workers.discard(worker)
        self._busy_long.discard(worker)
        self._hand_out()
        self._on_change()
        backoff = Backoff(_FIRST_BACKOFF_S, _LAST_BACKOFF_S)
        while True:
            try:
                await self._start_worker()
            except (ModelFilesError, WorkerLost, TimeoutError, OSError) as error:
                delay = backoff.next_delay()
                _log.error(
                    "a worker could not be replaced", reason=type(error).__name__, retry_in_s=round(delay, 3)
                )
                await asyncio.sleep(delay)
            else:
                _log.warning("a worker was replaced", lost_pid=worker.pid)
                return

    async def _start_worker(self) -> WorkerReady:
        async with asyncio.timeout(self._limits.start_timeout_s):
            worker, ready = await WorkerProcess.start(self._setup)
        self._workers.add(worker)
        self._free(worker)
        self._in_background(self._watch(worker))
        self._on_change()
        return ready

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _start_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first cause, as one line."""
    cause = failures.exceptions[0]
    if isinstance(cause, TimeoutError):
        return ModelFilesError("a worker did not load the model's files in time")
    if isinstance(cause, WorkerLost):
        return ModelFilesError(f"a worker died while it loaded the model's files{cause}")
    return cause
