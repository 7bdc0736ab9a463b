"""Run `catenary vllm-serve` and `catenary gaudi-start`: `catenary up` with the options of vLLM's commands."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from catenary.config import ConfigError, flag_name, parse_flags
from catenary_apps.migration.launch import ENGINE as ENGINE_PREFIX
from catenary_apps.migration.launch import UP as UP_PREFIX
from catenary_apps.migration.launch import Launch
from catenary_apps.migration.letters import R1_SCRIPT, SCRIPT, Letter, launch_of, read_letters
from catenary_apps.migration.serve import SERVE_GROUPS, UnknownOptionError, parse_serve
from catenary_apps.migration.serve_options import Kind, ServeOption
from services.engine.vllm_variables import Row, Status

RECIPES = f"{ENGINE_PREFIX}RECIPE_CACHE"
# What every such command has beside vLLM's own words, as lines for --help.
COMMON_HELP: Final = """\
  --dry-run
      say the command that this is, and start nothing
  -- OPTIONS
      options of catenary up, which win over the others: -- --router-port 0 --tokenizer-port 0
      --cache-dir DIRECTORY (catenary up --help lists them)
"""
_WIDTH: Final = 100
_DRY: Final = "--dry-run"


def start(program: str, words: Sequence[str], make: Callable[[list[str]], Launch]) -> int:
    """Say what is done and do it; with --dry-run only say it. A refusal is one line and exit code 2.

    `make` reads vLLM's words, which are those before `--`.
    """
    ours, own = _parted(words)
    dry = _DRY in ours or _DRY in own
    try:
        launch = _launched(program, [word for word in ours if word != _DRY], make)
        _ask(launch, [word for word in own if word != _DRY], program)
        variables = launch.variables(os.environ)
        if not dry:
            _make_cache(variables.get(RECIPES, ""))
    except ConfigError as error:
        sys.stderr.write(f"{program}: {error}\n")
        return error.exit_code
    for line in launch.warnings:
        print(f"warning: {line}")
    for line in launch.notes:
        print(line)
    print(f"this is: {launch.command(variables)}", flush=True)
    if dry:
        return 0
    from catenary_apps.up.run import run_up

    flags = launch.flags(variables)
    os.environ.update(variables)
    return run_up(flags)


def asks_for_help(words: Sequence[str]) -> bool:
    """Return whether --help or -h is among vLLM's words."""
    return not {"--help", "-h"}.isdisjoint(_parted(words)[0])


def _parted(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return vLLM's words, and those of `catenary up` behind --."""
    at = words.index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :])


def _launched(program: str, words: list[str], make: Callable[[list[str]], Launch]) -> Launch:
    try:
        return make(words)
    except UnknownOptionError as error:
        if not _is_ups(error.name):
            raise
        raise ConfigError(
            f"{error.name} is an option of catenary up: write it behind --, as in "
            f"{program} ... -- {error.name} VALUE"
        ) from None


def _is_ups(flag: str) -> bool:
    from catenary_apps.up.config import UpConfig

    return flag.replace("_", "-") in map(flag_name, UpConfig.model_fields)


def _ask(launch: Launch, words: list[str], program: str) -> None:
    """Ask for the options of `catenary up` among the words. Raises ConfigError."""
    if not words:
        return
    from catenary_apps.up.config import UpConfig

    for name, value in parse_flags(UpConfig, words, prog=program).items():
        launch.ask(f"{UP_PREFIX}{name.upper()}", value)


def _make_cache(directory: str) -> None:
    """Make the recipe cache's directory. Raises ConfigError if it cannot be made."""
    if not directory:
        return
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the recipe cache {directory} cannot be made: {error.strerror}") from None


def help_of(groups: Mapping[str, Iterable[tuple[str, Row]]]) -> str:
    """Return options by heading as lines for --help, each as it is written and with its row.

    Those that do something come first, with what they do; behind them those without effect and those that
    are refused, with the reason.
    """
    found = {heading: list(group) for heading, group in groups.items()}
    lines: list[str] = []
    for heading, group in found.items():
        done = [(written, row) for written, row in group if row.status.has_effect and not _refused(row)]
        lines += [*_section(heading, done), ""] if done else []
    rest = [(written, row) for group in found.values() for written, row in group]
    for heading, wanted in (
        ("Taken, without effect here (a warning says why)", lambda row: not row.status.has_effect),
        ("Refused, but for values that change nothing", _refused),
    ):
        section = [(written, row) for written, row in rest if wanted(row)]
        lines += [*_section(heading, section), ""] if section else []
    return "\n".join(lines)


def _refused(row: Row) -> bool:
    return row.status is Status.REFUSED


def _section(heading: str, options: Iterable[tuple[str, Row]]) -> list[str]:
    lines = [f"{heading}:"]
    for written, row in options:
        lines.append(f"  {written}")
        lines += textwrap.wrap(
            row.note.replace("`", ""), _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
        )
    return lines


VLLM_SERVE = "catenary vllm-serve"
_VLLM_SERVE_USAGE = f"""\
usage: catenary vllm-serve MODEL [OPTIONS OF vllm serve] [--dry-run] [-- OPTIONS OF catenary up]

Starts catenary up with what the options of vllm serve ask for. Each is listed with what stands for it here;
docs/migration.md has the same with vLLM's variables.

{COMMON_HELP}  --config FILE
      YAML file of options of vllm serve; those of the command line win
"""
_VALUES = {Kind.VALUE: " VALUE", Kind.FLAG: "", Kind.WORDS: " VALUE ..."}


def run_vllm_serve(argv: Sequence[str]) -> int:
    """Run `catenary vllm-serve`; the exit code is that of `catenary up`, 2 for a wrong command line."""
    if asks_for_help(argv):
        groups = {
            heading: [(_written_option(option), option.row) for option in group]
            for heading, group in SERVE_GROUPS.items()
        }
        print(f"{_VLLM_SERVE_USAGE}\n{help_of(groups)}", end="")
        return 0

    def make(words: list[str]) -> Launch:
        launch = Launch()
        parse_serve(words, launch)
        if not launch.asked(f"{UP_PREFIX}MODEL"):
            raise ConfigError("a model is missing: a directory or an id")
        if not launch.asked(f"{UP_PREFIX}HOST") and not os.environ.get(f"{UP_PREFIX}HOST"):
            launch.notes.append("listening on this machine alone; --host 0.0.0.0 is vLLM's default")
        return launch

    return start(VLLM_SERVE, argv, make)


def _written_option(option: ServeOption) -> str:
    return ", ".join(option.names) + _VALUES[option.kind]


GAUDI_START = "catenary gaudi-start"
_GAUDI_START_USAGE = f"""\
usage: catenary gaudi-start -w MODEL [LETTERS] [--dry-run] [-- OPTIONS OF catenary up]
       catenary gaudi-start --r1 -w MODEL -t 1 [LETTERS] [--dry-run] [-- OPTIONS OF catenary up]

Starts catenary up with what the letters of start_gaudi_vllm_server.sh ask for; with --r1 letters are those of
the DeepSeek-R1 script (catenary gaudi-start --r1 --help).

{COMMON_HELP}"""


def run_gaudi_start(argv: Sequence[str]) -> int:
    """Run `catenary gaudi-start`; the exit code is that of `catenary up`, 2 for a wrong command line."""
    if asks_for_help(argv):
        script = R1_SCRIPT if "--r1" in argv else SCRIPT
        letters = [(_written_letter(entry), entry.row) for entry in script]
        print(f"{_GAUDI_START_USAGE}\n{help_of({'Letters': letters})}", end="")
        return 0
    return start(GAUDI_START, argv, lambda words: launch_of(read_letters(words)))


def _written_letter(entry: Letter) -> str:
    value = "" if entry.switch else " VALUE"
    default = f"   [default: {entry.default}]" if entry.default not in (None, "", "None") else ""
    return f"-{entry.letter}{value}{default}"
