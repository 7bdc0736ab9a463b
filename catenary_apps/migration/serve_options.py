"""Kinds of `vllm serve` options, and how each becomes an option of `catenary up`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
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
# The values with which an option asks for nothing: of all names of a row, or by name.
Nothing = tuple[str, ...] | Mapping[str, tuple[str, ...]]

_EMPTY = ("{}", "[]")


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


def sets(
    variable: str, note: str, test: str, *names: str, kind: Kind = Kind.VALUE, **words: str
) -> ServeOption:
    """Return an option that a variable of ours stands for; `words` translate values that differ."""

    def apply(launch: Launch, option: str, value: str) -> None:
        launch.ask(variable, words.get(value, value))

    return ServeOption(Row(names, Status.SUPPORTED, note, test=test), kind, apply)


def sets_engine(option: str, test: str, *names: str, kind: Kind = Kind.VALUE, **words: str) -> ServeOption:
    """Return an option that an option of the engine stands for."""
    flag = f"`--{option.replace('_', '-')}` of the engine"
    return sets(f"{ENGINE}{option.upper()}", flag, test, *names, kind=kind, **words)


def idle(note: str, *names: str, kind: Kind = Kind.VALUE, nothing: Nothing = ()) -> ServeOption:
    """Return an option that there is nothing to do for: it gives a warning, unless it asks for nothing.

    `nothing`: values that do not, as vLLM's own defaults; of a flag it is false, if nothing else is said.
    """
    silent = nothing or (("false",) if kind is Kind.FLAG else ())

    def apply(launch: Launch, option: str, value: str) -> None:
        values = silent if isinstance(silent, tuple) else silent.get(option, ())
        if not _is_one_of(value, values):
            launch.warn(f"{option} has no effect: {note.replace('`', '')}")

    return ServeOption(Row(names, Status.NOT_NEEDED, note), kind, apply)


def only(reason: str, accepted: tuple[str, ...], *names: str, kind: Kind = Kind.VALUE) -> ServeOption:
    """Return an option of which only those values are possible that are so anyway; others are refused."""

    def apply(launch: Launch, option: str, value: str) -> None:
        if not _is_one_of(value, accepted):
            raise refuse(option, "" if kind is Kind.FLAG else value, reason)

    words = [f"`{word}`" if word else "an empty text" for word in accepted]
    verb = "changes" if len(words) == 1 else "change"
    values = f"; {' and '.join(words)} {verb} nothing" if words else ""
    return ServeOption(Row(names, Status.REFUSED, reason + values), kind, apply)


def _is_one_of(value: str, values: tuple[str, ...]) -> bool:
    """Return whether a text is one of these, in any case, or the same number, or an empty object or list."""
    if value in _EMPTY or value.lower() in values:
        return True
    try:
        number = float(value)
    except ValueError:
        return False
    return any(number == float(one) for one in values if one.isdecimal())


def supported(apply: Apply, note: str, test: str, *names: str, kind: Kind = Kind.VALUE) -> ServeOption:
    """Return an option with a rule of its own."""
    return ServeOption(Row(names, Status.SUPPORTED, note, test=test), kind, apply)
