"""`catenary gaudi-start`: takes the letters of start_gaudi_vllm_server.sh and starts `catenary up`."""

from __future__ import annotations

from collections.abc import Sequence

from catenary_apps.cli.launching import COMMON_HELP, asks_for_help, help_of, start
from catenary_apps.migration import R1_SCRIPT, SCRIPT, Letter, launch_of, read_letters

PROGRAM = "catenary gaudi-start"
USAGE = f"""\
usage: catenary gaudi-start -w MODEL [LETTERS] [--dry-run] [-- OPTIONS OF catenary up]
       catenary gaudi-start --r1 -w MODEL -t 1 [LETTERS] [--dry-run] [-- OPTIONS OF catenary up]

Starts catenary up with what the letters of start_gaudi_vllm_server.sh ask for; with --r1 letters are those of
the DeepSeek-R1 script (catenary gaudi-start --r1 --help).

{COMMON_HELP}"""


def run_gaudi_start(argv: Sequence[str]) -> int:
    """Run `catenary gaudi-start`; the exit code is that of `catenary up`, 2 for a wrong command line."""
    if asks_for_help(argv):
        script = R1_SCRIPT if "--r1" in argv else SCRIPT
        letters = [(_written(entry), entry.row) for entry in script]
        print(f"{USAGE}\n{help_of({'Letters': letters})}", end="")
        return 0
    return start(PROGRAM, argv, lambda words: launch_of(read_letters(words)))


def _written(entry: Letter) -> str:
    value = "" if entry.switch else " VALUE"
    default = f"   [default: {entry.default}]" if entry.default not in (None, "", "None") else ""
    return f"-{entry.letter}{value}{default}"
