"""Standard input, output and error of every process of ours, whatever it was started with.

Without imports of ours, and of nothing that takes time to load: it is the first thing that a command does.
"""

from __future__ import annotations

import io
import os
import sys


def open_standard_streams() -> None:
    """Make standard input, output and error usable, whatever the process was started with.

    A closed one becomes /dev/null: else the next file to be opened takes its number, and libuv aborts for an
    event loop's descriptor of 0, 1 or 2. A character that the encoding lacks is written as an escape.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            # Open for as long as the process runs.
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
        stream = getattr(sys, name)
        if mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
