"""`catenary bench`: which of its two commands runs, and how it ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from catenary.nearest import near
from catenary_apps.bench.options import BenchServeConfig, BenchThroughputConfig
from catenary_apps.cli.output import INSTALL_BENCH, load_options

USAGE = """\
usage: catenary bench serve|throughput [OPTIONS]

  serve       load on any server of the OpenAI API: latencies, throughput, goodput
  throughput  a batch of prompts in this process, without a server

  catenary bench COMMAND --help lists a command's options
"""

_COMMANDS = ("serve", "throughput")
# What is in the extra; its plots need matplotlib besides.
_NEEDED = frozenset(("httptools", "tokenizers", "rich"))


def run_bench(argv: Sequence[str]) -> int:
    """Run one of the commands: 1 with a line on stderr if nothing could be measured, 2 for wrong options."""
    command, rest = (argv[0], argv[1:]) if argv else ("", [])
    try:
        match command:
            case "serve":
                serving = load_options(BenchServeConfig, rest, prog="catenary bench serve")
                # Not before: a wrong option is to be refused without waiting for what measures.
                from catenary_apps.bench.serve import run_serve

                return run_serve(serving)
            case "throughput":
                cut = rest.index("--") if "--" in rest else len(rest)
                batch = load_options(BenchThroughputConfig, rest[:cut], prog="catenary bench throughput")
                from catenary_apps.bench.throughput import run_throughput

                return run_throughput(batch, rest[cut + 1 :])
            case "--help" | "-h" | "help":
                print(USAGE, end="")
                return 0
            case "":
                print(USAGE, end="", file=sys.stderr)
                return 2
            case _:
                hint = near(command, _COMMANDS, quoted=False) or ": serve or throughput"
                print(f"catenary bench: unknown command {command!r}{hint}", file=sys.stderr)
                return 2
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        print(f"catenary bench: {error.name} is missing: {INSTALL_BENCH}", file=sys.stderr)
        return 1
