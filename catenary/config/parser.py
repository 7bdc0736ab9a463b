"""The command line of a configuration class."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from pydantic.fields import FieldInfo

from catenary.config.describe import default_text, placeholder
from catenary.config.settings import ConfigError, ServiceConfig, env_name, flag_name, is_boolean, is_list

_PRECEDENCE = "Flags win over the environment, that over the YAML file, that over the defaults."


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.replace("\n", " "))


def build_parser(cls: type[ServiceConfig], *, prog: str) -> argparse.ArgumentParser:
    """A parser whose namespace holds only what was given, as text."""
    parser = _Parser(
        prog=prog,
        description=(cls.__doc__ or "").strip().split("\n")[0],
        epilog=". ".join(filter(None, [cls.elsewhere, _PRECEDENCE])).replace("%", "%%"),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=100),
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"YAML file of options, keys named like the flags. [env {env_name(cls, 'config')}]",
    )
    for name, field in cls.model_fields.items():
        _add_option(parser, cls, name, field)
    return parser


def _add_option(
    parser: argparse.ArgumentParser, cls: type[ServiceConfig], name: str, field: FieldInfo
) -> None:
    flag = flag_name(name)
    text = f"{field.description} [default: {default_text(name, field)}] [env {env_name(cls, name)}]".replace(
        "%", "%%"
    )
    if is_boolean(field):
        parser.add_argument(flag, dest=name, nargs="?", const="true", metavar="BOOL", help=text)
        parser.add_argument(
            "--no-" + flag.removeprefix("--"),
            dest=name,
            action="store_const",
            const="false",
            help=argparse.SUPPRESS,
        )
    else:
        action = "append" if is_list(field) else "store"
        parser.add_argument(flag, dest=name, action=action, metavar=placeholder(field), help=text)


def _unknown(cls: type[ServiceConfig], word: str) -> str:
    if not word.startswith("-"):
        return "unexpected argument; options are written as --name value (see --help)"
    if place := cls.elsewhere_for(word):
        return f"unknown option {word}; {place}"
    close = difflib.get_close_matches(word, [flag_name(name) for name in cls.model_fields], n=1)
    if close:
        return f"unknown option {word} (did you mean {close[0]}?)"
    return f"unknown option {word}" + (f"; {cls.elsewhere}" if cls.elsewhere else "")


def parse_flags(cls: type[ServiceConfig], argv: Sequence[str] | None, *, prog: str) -> dict[str, str]:
    """What the command line gave, by field name; lists joined by commas. `config` is among the keys if given.

    Raises:
        ConfigError: an unknown flag, or one without its value.
    """
    namespace, unknown = build_parser(cls, prog=prog).parse_known_args(argv)
    if unknown:
        # Without its value: a mistyped --api-key=... must not end in a log.
        raise ConfigError(_unknown(cls, unknown[0].split("=", 1)[0]))
    given: dict[str, Any] = vars(namespace)
    return {name: ",".join(value) if isinstance(value, list) else str(value) for name, value in given.items()}
