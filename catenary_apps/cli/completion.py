"""`catenary completion`: a script for the shell that completes commands and options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pkgutil import resolve_name

from catenary.config import ServiceConfig, build_parser, expected_one_of

USAGE = """\
usage: catenary completion bash|zsh

Prints a script that completes commands and options. For bash:
  catenary completion bash > ~/.local/share/bash-completion/completions/catenary
"""
# Of each command the class of its options; bench has two.
_OPTIONS = {
    "up": "catenary_apps.up.config:UpConfig",
    "chat": "catenary_apps.cli.chat:ChatConfig",
    "plan": "catenary_apps.plan.config:PlanConfig",
    "buckets": "catenary_apps.buckets.config:BucketsConfig",
    "profile": "catenary_apps.profile.config:ProfileConfig",
    "bench serve": "catenary_apps.bench.options:BenchServeConfig",
    "bench throughput": "catenary_apps.bench.options:BenchThroughputConfig",
    "top": "catenary_apps.top.run:TopConfig",
    "fleet": "catenary_apps.cli.fleet:FleetConfig",
    "drain": "catenary_apps.cli.drain:DrainConfig",
    "doctor": "catenary_apps.doctor.run:DoctorConfig",
}
_SHELLS = ("bash", "zsh")


def run_completion(argv: Sequence[str]) -> int:
    """Print the script for a shell; 2 with the usage for anything else."""
    if list(argv) in (["--help"], ["-h"]):
        print(USAGE, end="")
        return 0
    if len(argv) == 1 and argv[0] not in _SHELLS:
        print(f"catenary completion: {argv[0]!r}: {expected_one_of(argv[0], _SHELLS)}", file=sys.stderr)
        return 2
    if len(argv) != 1:
        print(USAGE, end="", file=sys.stderr)
        return 2
    try:
        import shtab
    except ImportError:
        print("catenary completion: shtab is missing: pip install shtab", file=sys.stderr)
        return 1

    print(shtab.complete(whole_parser(), shell=argv[0]))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """Return one parser of all commands and their options. A command without help would not be completed."""
    parser = argparse.ArgumentParser(prog="catenary")
    parser.add_argument("--version", action="store_true")
    commands = parser.add_subparsers()
    groups: dict[str, argparse._SubParsersAction[argparse.ArgumentParser]] = {}
    for name, path in _OPTIONS.items():
        command, _, below = name.partition(" ")
        options: type[ServiceConfig] = resolve_name(path)
        parts = build_parser(options, prog=f"catenary {name}")
        for action in parts._actions:
            if isinstance(action.metavar, str) and "|" in action.metavar:
                # What --help shows of a closed set of values: they are checked elsewhere.
                action.choices = action.metavar.removesuffix("[,...]").split("|")
        if not below:
            commands.add_parser(command, help=command, parents=[parts], add_help=False)
            continue
        if command not in groups:
            groups[command] = commands.add_parser(command, help=command).add_subparsers()
        groups[command].add_parser(below, help=below, parents=[parts], add_help=False)
    for command, flags in _foreign():
        foreign = commands.add_parser(command, help=command)
        for flag in flags:
            foreign.add_argument(flag)
    commands.add_parser("completion", help="completion").add_argument("shell", choices=_SHELLS)
    return parser


def _foreign() -> Iterator[tuple[str, Sequence[str]]]:
    """Yield commands that take the options of other programs, and those options."""
    from catenary_apps.migration.letters import SCRIPT
    from catenary_apps.migration.serve import SERVE_OPTIONS

    serve = [name for option in SERVE_OPTIONS for name in option.names]
    letters = [name for entry in SCRIPT for name in entry.row.names]
    for command, names in (("vllm-serve", serve), ("gaudi-start", letters)):
        yield command, [name for name in dict.fromkeys(names) if name.startswith("-") and name != "-h"]
