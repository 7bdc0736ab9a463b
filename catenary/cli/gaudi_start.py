"""`catenary gaudi-start`: takes the letters of start_gaudi_vllm_server.sh and starts `catenary up`."""

from __future__ import annotations

from collections.abc import Sequence

from catenary.cli.launching import start, table
from catenary.migration import R1_SCRIPT, SCRIPT, launch_of, read_letters

PROGRAM = "catenary gaudi-start"
USAGE = """\
usage: catenary gaudi-start -w MODEL [LETTERS] [--dry-run]
       catenary gaudi-start --r1 -w MODEL -t 1 [LETTERS] [--dry-run]

Starts catenary up with what the letters of start_gaudi_vllm_server.sh ask for; with --r1 letters are those of
the DeepSeek-R1 script. --dry-run only says how.

"""


def run_gaudi_start(argv: Sequence[str]) -> int:
    """Run `catenary gaudi-start`; the exit code is that of `catenary up`, 2 for a wrong command line."""
    words = [word for word in argv if word != "--dry-run"]
    if "-h" in words or "--help" in words:
        script = R1_SCRIPT if "--r1" in words else SCRIPT
        print(USAGE + table(entry.row for entry in script), end="")
        return 0
    return start(PROGRAM, lambda: launch_of(read_letters(words)), dry=len(words) < len(argv))
