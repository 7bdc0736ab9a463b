"""Run a command that ends, with all that it started, when the process that asked for it ends.

`python guard.py COMMAND...`, its standard input being a pipe that the asking process holds the other end of.
A compiler's driver passes no signal on to the programs that it runs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def main() -> int:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    # The pipe is this process's alone: children of the command might close their input, or keep it open.
    pipe = os.dup(0)
    os.dup2(nothing, 0)
    threading.Thread(target=end_with_the_asking, args=(pipe,), daemon=True).start()
    try:
        pid = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
    except OSError as error:
        sys.stderr.write(f"error: {error.strerror}\n")
        return 127
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def end_with_the_asking(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    # Not sys.exit: an interpreter that ends waits for the thread, which blocks in a read.
    os._exit(main())
