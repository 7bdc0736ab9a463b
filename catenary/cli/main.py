"""The `catenary` command: names its subcommands and loads the one that is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from catenary import __version__

USAGE = """\
usage: catenary COMMAND [OPTIONS]

  up           serve a model on this machine: gateway, router, tokenizer and engine under one supervisor
  chat         talk to a server from the terminal
  plan         what an engine would do with a model on a card: memory, buckets, warm-up, settings
  buckets      compare the static shapes that an engine would have, and learn better ones
  profile      record what a running engine's steps spend their time on
  bench        load on a server of the OpenAI API, or a batch in this process, and what it shows
  top          watch engines, lanes and routers live
  fleet        the same as JSON, once
  drain        let an engine finish what it has and end
  doctor       check whether this host is set up for Gaudi cards, and say what to do
  vllm-serve   up, with the options of vllm serve
  gaudi-start  up, with the letters of start_gaudi_vllm_server.sh

  catenary COMMAND --help lists a command's options
  catenary --version

Each service also runs alone: python -m gateway, services.router, services.tokenizer, services.engine
"""


_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; 2 for a wrong command line, 130 after a Ctrl-C."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return _INTERRUPTED


def _run(arguments: list[str]) -> int:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    match command:
        case "up":
            from catenary.cli.up import run_up

            return run_up(rest)
        case "vllm-serve":
            from catenary.cli.vllm_serve import run_vllm_serve

            return run_vllm_serve(rest)
        case "gaudi-start":
            from catenary.cli.gaudi_start import run_gaudi_start

            return run_gaudi_start(rest)
        case "chat":
            from catenary.cli.chat import run_chat

            return run_chat(rest)
        case "plan":
            from catenary.cli.plan import run_plan

            return run_plan(rest)
        case "buckets":
            from catenary.cli.buckets import run_buckets

            return run_buckets(rest)
        case "profile":
            from catenary.cli.profile import end_on_sigterm, run_profile

            end_on_sigterm()
            return run_profile(rest)
        case "bench":
            from catenary.cli.bench import run_bench

            return run_bench(rest)
        case "top":
            from catenary.cli.top import run_top

            return run_top(rest)
        case "fleet":
            from catenary.cli.fleet import run_fleet

            return run_fleet(rest)
        case "drain":
            from catenary.cli.drain import run_drain

            return run_drain(rest)
        case "doctor":
            from catenary.cli.doctor import run_doctor

            return run_doctor(rest)
        case "--version" | "-V" | "version":
            print(f"catenary {__version__}")
            return 0
        case "--help" | "-h" | "help":
            print(USAGE, end="")
            return 0
        case "":
            print(USAGE, end="", file=sys.stderr)
            return 2
        case _:
            print(f"catenary: unknown command {command!r}; see catenary --help", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
