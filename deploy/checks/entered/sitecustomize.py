"""Record which source files' functions are entered, in every process that has this folder on its PYTHONPATH.

ENTERED_DIRECTORY names a folder with a file `window` of one byte: 0 while nothing is recorded, else the
number of the window. Each process appends a line "window path" to its own file `<pid>.entered` there when a
function of a file below ENTERED_ROOT is entered or resumed in a window for the first time. Code that runs as
a module is imported is not recorded.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from types import FrameType
from typing import Any


def _record(directory: str, root: str) -> None:
    with open(os.path.join(directory, "window"), "rb") as window:
        number = mmap.mmap(window.fileno(), 1, prot=mmap.PROT_READ)
    seen: set[tuple[int, str]] = set()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        current = number[0]
        if not current or event != "call":
            return
        code = frame.f_code
        key = (current, code.co_filename)
        if key in seen or code.co_name == "<module>":
            return
        seen.add(key)
        if not code.co_filename.startswith(root):
            return
        with open(os.path.join(directory, f"{os.getpid()}.entered"), "a", encoding="utf-8") as out:
            out.write(f"{current} {code.co_filename[len(root) :]}\n")

    threading.setprofile(note)
    sys.setprofile(note)


if "ENTERED_DIRECTORY" in os.environ:
    _record(os.environ["ENTERED_DIRECTORY"], os.environ["ENTERED_ROOT"].rstrip("/") + "/")
