"""Scripted engines for tests: in this process with a fault board, or as a process of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from catenary_testing.engine import Faults, Script, ScriptedEngineApp
from services.engine.config import EngineConfig
from tests.support.secrets import TestSecrets
from tests.support.waiting import eventually

# Short waits for tests; everything else is the engine's default.
FAST: dict[str, Any] = {
    "attach_backoff_s": 0.02,
    "attach_backoff_max_s": 0.1,
    "attach_refused_backoff_s": 0.1,
    "core_restart_backoff_s": 0.02,
    "core_restart_backoff_max_s": 0.1,
    "drain_s": 5.0,
}


class ScriptedEngine:
    """The real servicer over a scripted core, in this process. `faults` is its switch board."""

    def __init__(
        self, routers: Sequence[str], secrets: TestSecrets, *, script: Script | None = None, **options: Any
    ) -> None:
        config = EngineConfig(router=tuple(routers), **{**FAST, **secrets.options, **options})
        self.app = ScriptedEngineApp(config, script or Script())
        self.faults: Faults = self.app.faults

    @property
    def instance_id(self) -> str:
        """What the engine calls itself in its hello."""
        return self.app.instance_id

    async def start(self) -> None:
        """Start; attaching goes on in the background."""
        await self.app.start()

    async def stop(self, drain_s: float = 0.0) -> None:
        """Stop in good order. Idempotent."""
        await self.app.stop(drain_s)

    async def idle(self) -> None:
        """Wait until the engine holds no sequence and no block."""
        await eventually(
            lambda: self.app.frontend.live_sequences == 0 and self.app.frontend.load().used_blocks == 0,
            "an idle engine",
        )

    def drop_streams(self) -> None:
        """Close the Attach streams; the engine attaches anew."""
        self.faults.drop_streams()


class EngineProcess:
    """`python -m catenary_testing.engine` as a process; it can be killed, stopped and started again."""

    def __init__(
        self,
        routers: Sequence[str],
        secrets: TestSecrets,
        directory: Path,
        *,
        script: Script | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        self.log = directory / "engine.log"
        source = "default"
        if script is not None:
            source = str(directory / "script.json")
            Path(source).write_bytes(msgspec.json.encode(script))
        self._command = [
            *(sys.executable, "-m", "catenary_testing.engine", "--script", source),
            *("--router", ",".join(routers), "--listen", f"unix:{directory}/engine.sock"),
            *(f"--{name.replace('_', '-')}={value}" for name, value in FAST.items()),
            *(*secrets.flags, *flags),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Spawn it; its log is appended to `log`."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stderr=log, stdout=log)

    def signal(self, number: signal.Signals) -> None:
        """SIGKILL, SIGSTOP, SIGCONT, SIGTERM."""
        os.kill(self.pid, number)

    async def wait(self, timeout_s: float = 15.0) -> int:
        """Wait for the end; the exit status, negative for a signal."""
        process = self._process
        assert process is not None
        return await asyncio.wait_for(asyncio.to_thread(process.wait), timeout_s)

    async def stop(self) -> None:
        """Kill it if it lives. Idempotent."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            await self.wait()
