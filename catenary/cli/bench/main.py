"""`catenary bench`: which of its two commands runs, and how it ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from catenary.cli.output import INSTALL_BENCH

USAGE = """\
usage: catenary bench serve|throughput [OPTIONS]

  serve       load on any server of the OpenAI API: latencies, throughput, goodput
  throughput  a batch of prompts in this process, without a server

  catenary bench COMMAND --help lists a command's options
"""

# What is in the extra; its plots need matplotlib besides.
_NEEDED = frozenset(("httptools", "tokenizers", "rich"))


def run_bench(argv: Sequence[str]) -> int:
    """Run one of the commands: 1 with a line on stderr if nothing could be measured, 2 for wrong options."""
    command, rest = (argv[0], argv[1:]) if argv else ("", [])
    try:
        match command:
            case "serve":
                from catenary.cli.bench.serve import run_serve

                return run_serve(rest)
            case "throughput":
                from catenary.cli.bench.throughput import run_throughput

                return run_throughput(rest)
            case "--help" | "-h" | "help":
                print(USAGE, end="")
                return 0
            case "":
                print(USAGE, end="", file=sys.stderr)
                return 2
            case _:
                print(f"catenary bench: unknown command {command!r}: serve or throughput", file=sys.stderr)
                return 2
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        print(f"catenary bench: {error.name} is missing: {INSTALL_BENCH}", file=sys.stderr)
        return 1
