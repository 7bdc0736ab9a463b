"""Starts of services that come to nothing: many of them, without the seconds that imports take each time.

One process imports the services; each start is a fork of it that does what `python -m MODULE` does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MODULES = ("gateway", "services.engine", "services.router", "services.tokenizer", "catenary_testing.engine")

_FORKS = """
import gc, importlib, json, os, runpy, sys, tempfile, traceback
for name in sys.argv[1:]:
    importlib.import_module(name + ".__main__")
nothing = os.open(os.devnull, os.O_RDONLY)
# What a child does not touch need not be copied for it.
gc.freeze()
for line in sys.stdin:
    module, *flags = json.loads(line)
    files = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    child = os.fork()
    if not child:
        os.dup2(nothing, 0)
        os.dup2(files[0].fileno(), 1)
        os.dup2(files[1].fileno(), 2)
        sys.argv = [module, *flags]
        status = 0
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code or 0
            if isinstance(status, str):
                print(status, file=sys.stderr)
                status = 1
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    texts = []
    for file in files:
        file.seek(0)
        texts.append(file.read().decode())
    print(json.dumps([code, *texts]), flush=True)
"""


class Starts:
    """The process that forks."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, module: str, *flags: str) -> subprocess.CompletedProcess[str]:
        """What `python -m MODULE FLAGS` comes to; it must end by itself."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([module, *flags]) + "\n")
        self._process.stdin.flush()
        code, out, err = json.loads(self._process.stdout.readline())
        return subprocess.CompletedProcess([module, *flags], code, out, err)


@contextmanager
def forked_starts() -> Iterator[Starts]:
    """Starts of the services in `MODULES`."""
    command = [sys.executable, "-W", "ignore", "-c", _FORKS, *MODULES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Starts(process)
        finally:
            process.kill()
