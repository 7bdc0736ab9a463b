"""Count the files that one chat crosses: own files in which a function is entered while it is served.

`catenary up` of the tree at hand serves its small default model, in all its processes (supervisor, gateway,
router, tokenizer and its workers, the engine's servicer and its core), each with `entered/sitecustomize.py`
on its path. After some chats to warm up, the same chat (streamed, sampled, two messages, twelve tokens) is
asked several times. A file counts for a process if in the time from each request until the end of its answer
a function of the file was entered, or a coroutine or generator of it resumed: in every one of these times, so
that a timer that strikes in some of them does not count; one that strikes in each of them does. Code that
runs at import does not count, nor do methods that a library makes (of a dataclass, say), stubs, C++, and the
files of `catenary_testing`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from import_graph import is_generated

HOOK = Path(__file__).with_name("entered")
PACKAGES = ("catenary/", "catenary_apps/", "services/", "gateway/")
# Processes by a word of their command lines; the first that fits.
PROCESSES = {
    "services.engine.core": "core",
    "services.engine": "servicer",
    "services.router": "router",
    "services.tokenizer.workers": "tokenizer's worker",
    "services.tokenizer": "tokenizer",
    "gateway": "gateway",
    " up": "supervisor",
}
WARM_UPS, WINDOWS, IDLE_WINDOWS = 4, 8, 3
START_S = 240.0
AIM = 90


@dataclass(frozen=True)
class ChatFiles:
    """Files by process, and all of them; `sometimes` are those of some windows only, not counted."""

    by_process: dict[str, list[str]]
    files: list[str]
    lines: int
    sometimes: list[str]
    idle: int
    """How many of `files` are entered within a second without any chat too."""

    def figures(self) -> dict[str, int]:
        """Numbers by name."""
        counts = {name: len(files) for name, files in self.by_process.items()}
        total = {"chat": len(self.files), "lines of these": self.lines, "of these, while idle too": self.idle}
        return total | counts


def count(root: Path) -> ChatFiles:
    """Serve chats from the tree at `root` and return the files that they cross.

    Raises RuntimeError if it does not serve within four minutes.
    """
    with tempfile.TemporaryDirectory(prefix="cat-", ignore_cleanup_errors=True) as scratch:
        directory = Path(scratch, "entered")
        directory.mkdir()
        window = directory / "window"
        window.write_bytes(b"\0")
        with _serving(root.resolve(), Path(scratch), directory) as (url, names):
            model = _model(url)
            for _ in range(WARM_UPS):
                _chat(url, model)
            for number in range(1, WINDOWS + 1):
                time.sleep(0.3)  # What still runs of the last one is not to count for the next.
                _write(window, number)
                _chat(url, model)
                _write(window, 0)
            for number in range(WINDOWS + 1, WINDOWS + IDLE_WINDOWS + 1):
                _write(window, number)
                time.sleep(1.0)
                _write(window, 0)
            named = names()
        return gathered(root, read_windows(directory, named), WINDOWS)


def read_windows(directory: Path, names: Mapping[int, str]) -> dict[str, dict[str, set[int]]]:
    """Return the windows in which each process entered each file: {process: {path: windows}}."""
    found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for file in directory.glob("*.entered"):
        process = names.get(int(file.stem), "other")
        for line in file.read_text(encoding="utf-8").splitlines():
            number, _, path = line.partition(" ")
            found[process][path].add(int(number))
    return found


def gathered(root: Path, entered: Mapping[str, Mapping[str, set[int]]], windows: int) -> ChatFiles:
    """Count own files that one process entered in every window of a chat; later windows had none."""
    by_process: dict[str, list[str]] = {}
    ever: set[str] = set()
    idle: set[str] = set()
    for process, paths in sorted(entered.items()):
        own = {
            path: seen for path, seen in paths.items() if path.startswith(PACKAGES) and not is_generated(path)
        }
        ever |= own.keys()
        chats = set(range(1, windows + 1))
        by_process[process] = sorted(path for path, seen in own.items() if chats <= seen)
        idle |= {path for path, seen in own.items() if seen - chats}
    files = sorted({path for paths in by_process.values() for path in paths})
    lines = sum(len((root / path).read_text(encoding="utf-8").splitlines()) for path in files)
    return ChatFiles(by_process, files, lines, sorted(ever.difference(files)), len(idle.intersection(files)))


def described(counted: ChatFiles) -> list[str]:
    """Return lines about one tree."""
    lines = [f"{name}: {value}" for name, value in counted.figures().items()]
    for process, files in counted.by_process.items():
        lines += ["", f"{process}:", *(f"  {path}" for path in files)]
    return [
        *lines,
        "",
        "in some of the chats only, not counted:",
        *(f"  {path}" for path in counted.sometimes),
    ]


def compared(before: ChatFiles, after: ChatFiles) -> list[str]:
    """Return lines about two trees."""
    then, now = before.figures(), after.figures()
    names = dict.fromkeys([*then, *now])
    lines = [f"{name}: {then.get(name, 0)} before, {now.get(name, 0)} after" for name in names]
    return [*lines, "", f"a chat is to cross at most {AIM} files"]


def command_of(root: Path) -> str:
    """Return the module behind a tree's entry point `catenary`."""
    scripts = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    return str(scripts["catenary"]).partition(":")[0]


@contextmanager
def _serving(
    root: Path, scratch: Path, directory: Path
) -> Iterator[tuple[str, Callable[[], dict[int, str]]]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("CATENARY_", "VLLM_"))}
    if (cache := os.environ.get("CATENARY_CACHE")) is not None:
        keep["CATENARY_CACHE"] = cache
    own = {
        "PYTHONPATH": f"{HOOK}:{root}",
        "ENTERED_DIRECTORY": str(directory),
        "ENTERED_ROOT": str(root),
        "XDG_STATE_HOME": str(scratch / "state"),
        "TMPDIR": str(scratch),
    }
    command = [sys.executable, "-m", command_of(root), "up", "--port", str(port), "--router-port", "0"]
    command += ("--tokenizer-port", "0", "--drain-s", "1", "--log-dir", str(scratch / "logs"))
    log = scratch / "up.log"
    with log.open("wb") as out, ExitStack() as ending:
        process = subprocess.Popen(
            command, cwd=scratch, env=keep | own, stdout=out, stderr=out, stdin=subprocess.DEVNULL
        )
        ending.callback(_end, process)
        deadline = time.monotonic() + START_S
        while not _ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"it does not serve:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.2)
        yield url, lambda: _names(process.pid)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.HTTPError):
        return False


def _model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        return str(json.load(answer)["data"][0]["id"])


def _chat(url: str, model: str) -> None:
    body = {
        "model": model,
        "messages": [
            {"role": "system", "content": "You answer in one sentence."},
            {"role": "user", "content": "Name the capital of France."},
        ],
        "stream": True,
        "temperature": 0.7,
        "seed": 7,
        "max_tokens": 12,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        told = answer.read()
    if b"[DONE]" not in told:
        raise RuntimeError(f"a chat was not answered: {told[-300:]!r}")


def _write(window: Path, number: int) -> None:
    with window.open("r+b") as file:
        file.write(bytes([number]))


def _names(pid: int) -> dict[int, str]:
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        command = Path(f"/proc/{one}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        found[one] = next((name for word, name in PROCESSES.items() if word in command), "other")
        for task in Path(f"/proc/{one}/task").iterdir():
            waiting += map(int, (task / "children").read_text().split())
    return found
