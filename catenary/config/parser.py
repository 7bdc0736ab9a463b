"""The command line of a configuration class."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from pydantic.fields import FieldInfo

from catenary.config.describe import default_text, option_groups, placeholder
from catenary.config.settings import ConfigError, ServiceConfig, env_name, flag_name, is_boolean, is_list
from catenary.nearest import nearest

_PRECEDENCE = "Flags win over the environment, that over the YAML file, that over the defaults."


_NEAR_ELSEWHERE = 0.8
_NO_VALUE = re.compile(r"argument (--[\w-]+): expected one argument")
# The value itself stays out of the message.
_NEEDLESS_VALUE = re.compile(r"argument (--[\w-]+): ignored explicit argument .*", re.DOTALL)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if found := _NO_VALUE.fullmatch(message):
            action = self._option_string_actions[found[1]]
            message = f"{found[1]} needs a value: {found[1]} {action.metavar}"
        elif found := _NEEDLESS_VALUE.fullmatch(message):
            message = f"{found[1]} takes no value"
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
        usage=f"{prog} [{cls.positional.upper()}] [OPTIONS]" if cls.positional else f"{prog} [OPTIONS]",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"YAML file of options, keys named like the flags. [env {env_name(cls, 'config')}]",
    )
    for heading, names in option_groups(cls).items():
        group = parser.add_argument_group(heading)
        for name in names:
            _add_option(group, cls, name, cls.model_fields[name])
    return parser


def _add_option(
    group: argparse._ArgumentGroup, cls: type[ServiceConfig], name: str, field: FieldInfo
) -> None:
    flag = flag_name(name)
    default = default_text(name, field)
    shown = {"none": "", "required": " [required]"}.get(default, f" [default: {default}]")
    text = f"{field.description}{shown} [env {env_name(cls, name)}]".replace("%", "%%")
    if is_boolean(field):
        group.add_argument(flag, dest=name, nargs="?", const="true", metavar="BOOL", help=text)
        group.add_argument(
            "--no-" + flag.removeprefix("--"),
            dest=name,
            action="store_const",
            const="false",
            help=argparse.SUPPRESS,
        )
    else:
        action = "append" if is_list(field) else "store"
        group.add_argument(flag, dest=name, action=action, metavar=placeholder(field), help=text)


def _unknown(cls: type[ServiceConfig], word: str) -> str:
    if not word.startswith("-"):
        return "unexpected argument; options are written as --name value (see --help)"
    if word in ("-v", "-V"):
        return f"unknown option {word}: catenary --version is the version, --log-level debug says more"
    if place := cls.elsewhere_for(word):
        return f"unknown option {word}; {place}"
    own = {flag_name(name) for name in (*cls.model_fields, "config")}
    # One of another program has to be much like it: each of them has many.
    close = nearest(word, own.union(cls.elsewhere_flags()), likeness=_NEAR_ELSEWHERE) or nearest(word, own)
    if close is None:
        return f"unknown option {word}; {cls.elsewhere or '--help lists the options'}"
    place = "" if close in own else f"; {cls.elsewhere_for(close)}"
    return f"unknown option {word} (did you mean {close}?){place}"


def parse_flags(cls: type[ServiceConfig], argv: Sequence[str] | None, *, prog: str) -> dict[str, str]:
    """What the command line gave, by field name; lists joined by commas. `config` is among the keys if given.

    Raises:
        ConfigError: an unknown flag, or one without its value.
    """
    namespace, unknown = build_parser(cls, prog=prog).parse_known_args(argv)
    given: dict[str, Any] = vars(namespace)
    # A word behind an unknown flag is that flag's value, if it is one at all.
    words = [] if any(word.startswith("-") for word in unknown) else unknown
    if cls.positional and words and cls.positional not in given:
        several = is_list(cls.model_fields[cls.positional])
        given[cls.positional], unknown = (words, []) if several else (words[0], words[1:])
    if unknown:
        # Without its value: a mistyped --api-key=... must not end in a log.
        flag = next((word for word in unknown if word.startswith("-")), unknown[0])
        raise ConfigError(_unknown(cls, flag.split("=", 1)[0]))
    return {name: ",".join(value) if isinstance(value, list) else str(value) for name, value in given.items()}
