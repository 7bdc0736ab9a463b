"""One worker process, seen from the service."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from pathlib import Path

import msgspec

import services
from catenary.memory import MemoryWatch
from catenary.runtime import module_command
from services.tokenizer.rendering import ModelFilesError
from services.tokenizer.workers.frames import AsyncFrames, LinkClosed
from services.tokenizer.workers.messages import Answer, Greeting, Task, WorkerFailed, WorkerReady

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
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @classmethod
    async def start(cls, setup: bytes) -> tuple[WorkerProcess, WorkerReady]:
        """Spawn a worker, hand it the encoded WorkerSetup, wait until it has loaded.

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
        ours.setblocking(False)
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
        """The worker's answer. Raises WorkerLost."""
        try:
            await self._frames.send(self._encoder.encode(task))
            answer: Answer = self._answers.decode(await self._frames.receive())
            return answer
        except (LinkClosed, msgspec.MsgspecError):
            # Whoever answers what is no answer has lost its way; the pool sees the end of the process.
            await self.kill()
            raise WorkerLost from None

    async def ended(self) -> None:
        """Return when the process has ended."""
        await self._process.wait()

    async def kill(self) -> None:
        """End the process at once and wait until it is gone."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._frames.close()
        await self._process.wait()

    async def _end_status(self) -> int:
        """The exit status of a process whose link is closed; one that does not end of itself is killed."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _EXIT_GRACE_S)
        await asyncio.shield(self.kill())
        return self._process.returncode or 0

    async def _greet(self, setup: bytes) -> Greeting:
        try:
            await self._frames.send(setup)
            greeting: Greeting = msgspec.msgpack.decode(await self._frames.receive(), type=Greeting)
            return greeting
        except LinkClosed:
            raise WorkerLost from None


def _environment() -> dict[str, str]:
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    root = str(Path(str(services.__file__)).parent.parent)
    # Processes are the parallelism; threads inside of one would only fight for the same cores.
    return environment | {"PYTHONPATH": root, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
