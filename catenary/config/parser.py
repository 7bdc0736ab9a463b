"""The command line of a configuration class: its flags and --help, and its table for the documentation."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from catenary.config.settings import (
    ConfigError,
    Expert,
    ServiceConfig,
    env_name,
    flag_name,
    is_boolean,
    is_list,
    is_secret,
)
from catenary.nearest import nearest

# The group of options that no heading covers.
_NO_HEADING = "Options"


def _kinds(annotation: Any) -> list[Any]:
    """Return the scalar types in an annotation: unions and containers taken apart."""
    if get_origin(annotation) is Literal:
        return [annotation]
    inner = [arg for arg in get_args(annotation) if arg is not Ellipsis]
    if not inner:
        return [] if annotation is type(None) else [annotation]
    return [kind for arg in inner for kind in _kinds(arg)]


def placeholder(field: FieldInfo) -> str:
    """Return the value's placeholder in --help: INT, FILE, a|b."""
    kind = next(iter(_kinds(field.annotation)), str)
    if get_origin(kind) is Literal:
        text = "|".join(str(value) for value in get_args(kind))
    elif inspect.isclass(kind) and issubclass(kind, Enum):
        text = "|".join(str(member.value) for member in kind)
    elif kind is Path:
        text = "PATH"
    else:
        text = {int: "INT", float: "NUMBER", bool: "BOOL"}.get(kind, "TEXT")
    return f"{text}[,...]" if is_list(field) else text


def default_text(name: str, field: FieldInfo) -> str:
    """Return the default as one would write it on the command line."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if value is None or value in ((), [], "", frozenset()):
        return "none"
    if is_secret(name, field):
        return "set"
    if isinstance(value, (list, tuple, set, frozenset)):
        return ",".join(str(item) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value.value if isinstance(value, Enum) else value)


def option_groups(cls: type[ServiceConfig]) -> dict[str, list[str]]:
    """Return the fields by heading, first those of the most derived class that declares any.

    A group ends at the next heading, or with the class that declares its first field. One that the class
    itself begins goes on over fields of its bases.
    """
    headings = {name: text for base in cls.__mro__ for name, text in getattr(base, "headings", {}).items()}
    declared = {name: base for base in cls.__mro__ for name in inspect.get_annotations(base)}
    groups: dict[str, list[str]] = {}
    heading, first = _NO_HEADING, None
    for name in cls.model_fields:
        if name in headings:
            heading, first = headings[name], declared[name]
        elif declared[name] is not first and first is not cls:
            heading, first = _NO_HEADING, declared[name]
        groups.setdefault(heading, []).append(name)
    own = next(names for base in cls.__mro__ if (names := inspect.get_annotations(base)))
    return dict(sorted(groups.items(), key=lambda item: item[1][0] not in own))


def options_markdown(classes: Mapping[str, type[ServiceConfig]]) -> str:
    """Return a section for each class, keys being the titles, with a table for each group of options.

    Groups with an `Expert` heading come last. The text ends with a line break.
    """
    return "\n".join(_section(title, cls) for title, cls in classes.items())


def _section(title: str, cls: type[ServiceConfig]) -> str:
    groups = option_groups(cls)
    usual = {heading: names for heading, names in groups.items() if not isinstance(heading, Expert)}
    expert = {heading: names for heading, names in groups.items() if isinstance(heading, Expert)}
    text = f"## {title}\n" + "".join(_table(cls, f"### {heading}", names) for heading, names in usual.items())
    if expert:
        text += "\n### Expert options\n\nThe defaults serve nearly all deployments.\n"
        text += "".join(_table(cls, f"#### {heading}", names) for heading, names in expert.items())
    return text


def _table(cls: type[ServiceConfig], heading: str, names: list[str]) -> str:
    rows = [
        f"| `{flag_name(name)}` | `{env_name(cls, name)}` | {_cell(_type_text(field))} "
        f"| {_cell(default_text(name, field))} | {_cell(field.description or '', code=False)} |"
        for name, field in cls.model_fields.items()
        if name in names
    ]
    head = "| flag | variable | value | default | meaning |\n| --- | --- | --- | --- | --- |"
    return f"\n{heading}\n\n{head}\n" + "\n".join(rows) + "\n"


def _type_text(field: FieldInfo) -> str:
    return "true|false" if is_boolean(field) else placeholder(field)


def _cell(text: str, *, code: bool = True) -> str:
    safe = text.replace("|", "\\|").replace("\n", " ")
    return f"`{safe}`" if code else safe


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
    """Return a parser whose namespace holds only what was given, as text."""
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
    """Return the given values by field name, lists joined by commas. `config` is among the keys if given.

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
