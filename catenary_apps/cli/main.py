"""The `catenary` command: names its subcommands and loads the one that is called."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pkgutil import resolve_name

import catenary.grpc_environment  # noqa: F401
from catenary.nearest import near
from catenary.standard_streams import open_standard_streams
from catenary.version import __version__

USAGE = """\
usage: catenary COMMAND [OPTIONS]

  up           serve models on this machine: starts gateway, router, tokenizer and engines
  chat         talk to a server from the terminal
  plan         estimate how a model runs on a card: memory, buckets, warm-up, recommended settings
  buckets      compare an engine's static shapes across strategies, and learn better ones from traffic
  profile      record where the steps of a running engine spend their time
  bench        measure a server with the OpenAI API under load, or a batch in this process
  top          watch engines, admission queues and routers live
  fleet        print the same once, as JSON
  drain        let an engine finish its sequences and exit
  doctor       check the set-up of this host for Gaudi cards, and suggest fixes
  vllm-serve   like up, with the options of vllm serve
  gaudi-start  like up, with the options of start_gaudi_vllm_server.sh
  completion   print a script that completes commands and options in bash or zsh

  catenary COMMAND --help, or catenary help COMMAND, lists a command's options
  catenary --version

Exit codes: 0 done, 1 failed, 2 wrong command line or configuration, 130 after Ctrl-C.
Each service also runs alone: python -m gateway, services.router, services.tokenizer, services.engine
"""


_COMMANDS = {
    "up": "catenary_apps.up.run:run_up",
    "chat": "catenary_apps.cli.chat:run_chat",
    "plan": "catenary_apps.plan.run:run_plan",
    "buckets": "catenary_apps.buckets.run:run_buckets",
    "profile": "catenary_apps.profile.run:run_profile_command",
    "bench": "catenary_apps.bench.main:run_bench",
    "top": "catenary_apps.top.run:run_top",
    "fleet": "catenary_apps.cli.fleet:run_fleet",
    "drain": "catenary_apps.cli.drain:run_drain",
    "doctor": "catenary_apps.doctor.run:run_doctor",
    "vllm-serve": "catenary_apps.up.launching:run_vllm_serve",
    "gaudi-start": "catenary_apps.up.launching:run_gaudi_start",
    "completion": "catenary_apps.cli.completion:run_completion",
}
# What other servers call our commands.
_ELSEWHERE = {"serve": "up", "run": "up", "start": "up", "server": "up", "ps": "fleet", "status": "fleet"}
# Commands that read variables of services, or hand them on.
_STARTING = ("up", "vllm-serve", "gaudi-start")
_PLANNING = ("plan",)
_INTERRUPTED = 130
_NOBODY_READS = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code.

    2 for a wrong command line, 130 after a Ctrl-C, 141 if who read the output went away, as `head` does.
    """
    open_standard_streams()
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # What is still in the buffer would fail again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOBODY_READS


def _run(arguments: list[str]) -> int:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command in _COMMANDS:
        # Here and not above: a command waits for its own imports alone.
        run: Callable[[Sequence[str]], int] = resolve_name(_COMMANDS[command])
        _warn_of_variables(command)
        return run(rest)
    match command:
        case "help" if rest and rest[0] in _COMMANDS:
            return _run([rest[0], "--help"])
        case "--version" | "-V" | "-v" | "version":
            print(f"catenary {__version__}")
            return 0
        case "--help" | "-h" | "help":
            print(USAGE, end="")
            return 0
        case "":
            print(USAGE, end="", file=sys.stderr)
            return 2
        case _:
            known = _ELSEWHERE.get(command)
            hint = f" (did you mean {known}?)" if known else near(command, (*_COMMANDS, "help"), quoted=False)
            print(f"catenary: unknown command {command!r}{hint}; see catenary --help", file=sys.stderr)
            return 2


def _warn_of_variables(command: str) -> None:
    """Say at once which CATENARY_* variables nothing reads, since what the command does may take long."""
    from catenary.config import SERVICE_PREFIXES, unknown_variables

    prefixes = [f"CATENARY_{command.upper()}_"]
    if command in _STARTING:
        prefixes = ["CATENARY_UP_", *SERVICE_PREFIXES]
    elif command in _PLANNING:
        prefixes.append("CATENARY_ENGINE_")
    for line in unknown_variables(os.environ, prefixes):
        print(f"warning: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
