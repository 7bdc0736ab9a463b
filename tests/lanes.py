"""`make test` and `make test-long`: all tests, in processes of pytest of which two run at a time.

    python tests/lanes.py [options of pytest]

One process leaves most of two cores idle: it waits for services, and services wait for it. Torch computes
with one thread a process here: threads that wait for one another are slow beside a second process. Each line
says which process wrote it; what a process says about its failures comes in one piece at its end.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LANES = 2
# The longest first. The simulated HPU changes torch for good: its tests must have a process of their own.
PARTS = (
    "tests/e2e",
    "tests/unit",
    "tests/integration",
    "tests/sim",
    "tests/compat",
    "tests/environment",
    "tests/chaos",
)
# What pytest answers where the options leave nothing to run.
NOTHING_TO_RUN = 5


@dataclass
class Part:
    """Tests that run in one process."""

    path: str
    output: list[str] = field(default_factory=list)
    seconds: float = 0.0
    exit_code: int | None = None

    @property
    def passed(self) -> bool:
        """Whether it ran to its end without a failure."""
        return self.exit_code in (0, NOTHING_TO_RUN)


class Run:
    """All parts, and the processes that run now."""

    def __init__(self, options: list[str]) -> None:
        self.parts = [Part(path) for path in PARTS]
        self._options = options
        self._left = list(self.parts)
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._lock = threading.Lock()

    def lane(self) -> None:
        """Run one part after another until none is left."""
        while True:
            with self._lock:
                if not self._left:
                    return
                part = self._left.pop(0)
            self._run(part)

    def stop(self) -> None:
        """Start nothing more and end what runs, as Ctrl-C does: fixtures end the services they started."""
        with self._lock:
            self._left.clear()
            for process in self._processes.values():
                process.send_signal(signal.SIGINT)

    def _run(self, part: Part) -> None:
        command = [sys.executable, "-u", "-m", "pytest", part.path, *self._options]
        environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        started = time.monotonic()
        with self._lock:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                cwd=ROOT,
                # Ctrl-C on a terminal reaches this process alone, which passes it on once.
                start_new_session=True,
            )
            self._processes[part.path] = process
        assert process.stdout is not None
        report: list[str] = []
        for line in process.stdout:
            part.output.append(line)
            if report or line.startswith("====="):
                report.append(line)
            else:
                self._say(part.path, [line])
        part.exit_code = process.wait()
        part.seconds = time.monotonic() - started
        with self._lock:
            del self._processes[part.path]
        self._say(part.path, report)

    def _say(self, path: str, lines: list[str]) -> None:
        name = path.removeprefix("tests/")
        with self._lock:
            sys.stdout.writelines(f"{name:11} | {line.rstrip()}\n" for line in lines)
            sys.stdout.flush()


def main(options: list[str]) -> int:
    """Run all parts; the exit code is 0 if all passed."""
    run = Run(options)
    for number in (signal.SIGINT, signal.SIGTERM):
        # SIGINT too: a shell's background job is started with it ignored, and so would be what it starts.
        signal.signal(number, signal.default_int_handler)
    with ThreadPoolExecutor(LANES) as pool:
        lanes = [pool.submit(run.lane) for _ in range(LANES)]
        try:
            # Not by joining threads: a join that is interrupted takes its thread for ended from then on.
            wait(lanes)
        except KeyboardInterrupt:
            run.stop()
            wait(lanes)
    sys.stdout.write("\n")
    for part in run.parts:
        # With more blanks it is a line of a log.
        failures = [line for line in part.output if re.match(r"(FAILED|ERROR) \S", line)]
        summary = part.output[-1].strip() if part.output else "was not run"
        verdict = "passed" if part.passed else f"FAILED (exit code {part.exit_code})"
        sys.stdout.write(f"{part.path:18} {verdict}, {part.seconds:.0f} s: {summary}\n")
        sys.stdout.writelines(f"    {line}" for line in failures)
    return 0 if all(part.passed for part in run.parts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
