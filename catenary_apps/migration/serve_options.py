"""Kinds of `vllm serve` options, and how each becomes an option of `catenary up`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from catenary.config import ConfigError
from catenary_apps.migration.launch import ENGINE, Launch
from services.engine.vllm_variables import Row, Status

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
    "t": 10**12,
}
_NUMBER = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)([kKmMgGtT]?)")


def count(text: str) -> int:
    """Return a whole number, or one with a unit: 16k is 16,000 and 16K is 16,384. Raises ValueError."""
    match = _NUMBER.fullmatch(text)
    if match is None or ("." in match[1] and not match[2]):
        raise ValueError("must be a whole number, or one with a unit as in 16k or 16K")
    if "." not in match[1]:
        return int(match[1]) * _UNITS[match[2]]
    return int(float(match[1]) * _UNITS[match[2]])


# Takes the option as it was written and its text; a flag's is true or false, a list's is joined by commas.
Apply = Callable[[Launch, str, str], None]
_TEST = "tests/unit/catenary_apps/migration/test_serve.py::"
_EMPTY = ("{}", "[]")
_OFF = ("false",)


class Kind(Enum):
    """VALUE takes one word, FLAG none (and has a --no- form), WORDS any number of them."""

    VALUE = "value"
    FLAG = "flag"
    WORDS = "words"


@dataclass(frozen=True, slots=True)
class ServeOption:
    """An option and its other names."""

    row: Row
    kind: Kind
    apply: Apply

    @property
    def names(self) -> tuple[str, ...]:
        """All ways to write it, without --no- forms."""
        return self.row.names


def refuse(option: str, value: str, reason: str) -> ConfigError:
    """Return the refusal of an option by its name."""
    return ConfigError(f"{option} {value[:60]}: {reason}" if value else f"{option}: {reason}")


# The names of a row are one text with blanks between them.


def sets(variable: str, note: str, names: str, *, kind: Kind = Kind.VALUE, **words: str) -> ServeOption:
    """Return an option that a variable of ours stands for; `words` translate values that differ."""

    def apply(launch: Launch, option: str, value: str) -> None:
        launch.ask(variable, words.get(value, value))

    return supported(apply, note, "test_option_sets_a_variable", names, kind=kind)


def sets_engine(option: str, names: str, *, kind: Kind = Kind.VALUE, **words: str) -> ServeOption:
    """Return an option that an option of the engine stands for."""
    flag = f"`--{option.replace('_', '-')}` of the engine"
    return sets(f"{ENGINE}{option.upper()}", flag, names, kind=kind, **words)


def idle(note: str, names: str, *, kind: Kind = Kind.VALUE) -> ServeOption:
    """Return an option that has no effect, of which a warning tells, unless its value asks for nothing.

    Such values, as vLLM's own defaults, follow the name: `--swap-space=0|4`. That of a flag is false, if none
    follows.
    """
    silent = {
        name: values.split("|") if told else []
        for name, told, values in (name.partition("=") for name in names.split())
    }

    def apply(launch: Launch, option: str, value: str) -> None:
        if not _is_one_of(value, silent.get(option) or (_OFF if kind is Kind.FLAG else ())):
            launch.warn(f"{option} has no effect: {note.replace('`', '')}")

    return ServeOption(Row(tuple(silent), Status.NOT_NEEDED, note), kind, apply)


def only(reason: str, names: str, accepted: Sequence[str] = (), *, kind: Kind = Kind.VALUE) -> ServeOption:
    """Return an option that is refused with any value but those that change nothing; of a flag, false."""
    accepted = _OFF if kind is Kind.FLAG else accepted

    def apply(launch: Launch, option: str, value: str) -> None:
        if not _is_one_of(value, accepted):
            raise refuse(option, "" if kind is Kind.FLAG else value, reason)

    words = [f"`{word}`" if word else "an empty text" for word in accepted]
    verb = "changes" if len(words) == 1 else "change"
    values = f"; {' and '.join(words)} {verb} nothing" if words else ""
    return ServeOption(Row(tuple(names.split()), Status.REFUSED, reason + values), kind, apply)


def supported(apply: Apply, note: str, test: str, names: str, *, kind: Kind = Kind.VALUE) -> ServeOption:
    """Return an option with a rule of its own, and the name of the test that covers it."""
    return ServeOption(Row(tuple(names.split()), Status.SUPPORTED, note, test=f"{_TEST}{test}"), kind, apply)


def _is_one_of(value: str, values: Sequence[str]) -> bool:
    """Return whether a text is one of these, in any case, or the same number, or an empty object or list."""
    if value in _EMPTY or value.lower() in values:
        return True
    try:
        number = float(value)
    except ValueError:
        return False
    return any(number == float(one) for one in values if one.isdecimal())
