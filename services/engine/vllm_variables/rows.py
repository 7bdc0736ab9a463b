"""Rows of the tables of vLLM's variables, and the typed reader of an environment that their rules share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from catenary.config import ConfigError, Given, expected_one_of, flag_name
from services.engine.options import vllm_variable

_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
_FALSE = frozenset({"0", "false", "f", "no", "n", "off"})


class Variables:
    """Reads an environment for the rules of the table and collects options and warnings.

    `own` is what the operator gave by our own options, by name: it always wins. An empty variable counts as
    one that is not set.
    """

    def __init__(self, environment: Mapping[str, str], own: Mapping[str, Any]) -> None:
        self._environment = environment
        self.own = own
        self.options: dict[str, Given] = {}
        self.warnings: list[str] = []

    def text(self, name: str) -> str | None:
        """Return the variable's text without blanks around it, None if it is not set or empty."""
        return self._environment.get(name, "").strip() or None

    def key(self, name: str) -> str | None:
        """Return a variable of keys as it is, None if it is not set.

        An empty one is for the option to refuse.
        """
        return self._environment.get(name)

    def boolean(self, name: str) -> bool | None:
        """Return a switch: 1, true, yes, on and their opposites. Raises ConfigError."""
        text = self.text(name)
        if text is None:
            return None
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise ConfigError(f"{name} {text[:40]!r}: must be true or false")

    def integer(self, name: str, *, least: int = 0, most: int = 2**31 - 1) -> int | None:
        """Return a whole number within bounds. Raises ConfigError."""
        text = self.text(name)
        if text is None:
            return None
        digits = text[1:] if text[0] in "+-" else text
        if not (digits.isascii() and digits.isdigit()) or len(digits) > 20:
            raise ConfigError(f"{name} {text[:40]!r}: must be a whole number")
        if not least <= (value := int(text)) <= most:
            raise ConfigError(f"{name} {text}: must be {least} to {most}")
        return value

    def choice(self, name: str, choices: Mapping[str, str]) -> str | None:
        """Return the meaning of the variable's word.

        Raises ConfigError for a word that is no key of `choices`.
        """
        text = self.text(name)
        if text is None:
            return None
        if text.lower() not in choices:
            raise ConfigError(f"{name} {text[:40]!r}: {expected_one_of(text, choices)}")
        return choices[text.lower()]

    def give(self, option: str, value: object, origin: str) -> None:
        """Set an option. A bad value is refused later under the name of `origin`."""
        self.options[option] = Given(value, origin)

    def warn(self, line: str) -> None:
        """Add a warning, once."""
        if line not in self.warnings:
            self.warnings.append(line)


Rule = Callable[[Variables], None]


class Status(Enum):
    """SUPPORTED: it does here what it does there. PASSED_ON: the vendor's software or the hub's library reads
    it, in our processes as in vLLM's. EQUIVALENT: something else does it, by itself or when asked.
    NOT_NEEDED: there is nothing here that it could do. REFUSED: what it asks for cannot be done yet.
    """

    SUPPORTED = "supported"
    PASSED_ON = "supported (passed on)"
    EQUIVALENT = "equivalent"
    NOT_NEEDED = "not needed"
    REFUSED = "refused"

    @property
    def has_effect(self) -> bool:
        """False if setting it changes nothing, so that it has to be said."""
        return self in (Status.SUPPORTED, Status.PASSED_ON, Status.REFUSED)


@dataclass(frozen=True, slots=True)
class Row:
    """`names` may hold * for any text. `note`: what stands for it here, or why nothing does.

    `rule` translates it; rows that one rule reads together share it. `test`: the test that shows the changed
    behaviour, as FILE::FUNCTION.
    """

    names: tuple[str, ...]
    status: Status
    note: str
    rule: Rule | None = None
    test: str = ""

    def matches(self, name: str) -> bool:
        """True if the row speaks of this name."""
        return any(fnmatchcase(name, pattern) for pattern in self.names)


def copied(option: str, test: str, meaning: str = "") -> Row:
    """Return the row of the variable that the option's declaration names: it has the same values.

    `meaning`: follows the flag in the note.
    """
    name = vllm_variable(option)

    def rule(variables: Variables) -> None:
        if (text := variables.text(name)) is not None:
            variables.give(option, text, name)

    note = f"`{flag_name(option)}`{meaning}"
    return Row((name,), Status.SUPPORTED, note, rule, test)


def unneeded(note: str, *names: str) -> Row:
    """Return a row of variables for which there is nothing to do."""
    return Row(names, Status.NOT_NEEDED, note)


def equivalent(note: str, *names: str) -> Row:
    """Return a row of variables whose work something else does."""
    return Row(names, Status.EQUIVALENT, note)


def passed_on(note: str, test: str, *names: str) -> Row:
    """Return a row of variables that reach the vendor's software or the hub's library as they are."""
    return Row(names, Status.PASSED_ON, note, test=test)
