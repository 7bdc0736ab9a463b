"""Foreign variables as they are read: typed, with one-line refusals, and what they turn into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from catenary.config import ConfigError, Given, expected_one_of

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
        """The variable's text without blanks around it, None if it is not set or empty."""
        return self._environment.get(name, "").strip() or None

    def key(self, name: str) -> str | None:
        """A variable of keys as it is, None if it is not set. An empty one is for the option to refuse."""
        return self._environment.get(name)

    def boolean(self, name: str) -> bool | None:
        """A switch: 1, true, yes, on and their opposites. Raises ConfigError."""
        text = self.text(name)
        if text is None:
            return None
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise ConfigError(f"{name} {text[:40]!r}: must be true or false")

    def integer(self, name: str, *, least: int = 0, most: int = 2**31 - 1) -> int | None:
        """A whole number within bounds. Raises ConfigError."""
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
        """What the variable's word stands for. Raises ConfigError for a word that is no key of `choices`."""
        text = self.text(name)
        if text is None:
            return None
        if text.lower() not in choices:
            raise ConfigError(f"{name} {text[:40]!r}: {expected_one_of(text, choices)}")
        return choices[text.lower()]

    def give(self, option: str, value: object, origin: str) -> None:
        """Sets an option. A bad value is refused later under the name of `origin`."""
        self.options[option] = Given(value, origin)

    def warn(self, line: str) -> None:
        """Adds a warning, once."""
        if line not in self.warnings:
            self.warnings.append(line)
