"""Options and variables of a `catenary up` that is asked for in vLLM's words."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping

from services.engine.vllm_variables import STRATEGY_VARIABLES, translate

UP, ENGINE, GATEWAY = "CATENARY_UP_", "CATENARY_ENGINE_", "CATENARY_GATEWAY_"
API_KEY = f"{UP}API_KEY"


class Launch:
    """Collects options of `catenary up` and variables for its services.

    What was asked for by name wins over the environment, as a flag does. A default of a start script gives
    way to our variables and to vLLM's.
    """

    def __init__(self) -> None:
        # By variable.
        self._asked: dict[str, str] = {}
        self._defaults: dict[str, tuple[str, str]] = {}
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def ask(self, variable: str, value: str) -> None:
        """Set a variable whatever the environment says."""
        self._asked[variable] = value

    def default(self, variable: str, value: str, *, beside: str = "") -> None:
        """Set a variable unless the environment or `ask` has a value for it, or for `beside`."""
        self._defaults[variable] = value, beside or variable

    def asked(self, variable: str) -> str | None:
        """Return the options asked for so far."""
        return self._asked.get(variable)

    def warn(self, line: str) -> None:
        """Add a warning, once."""
        if line not in self.warnings:
            self.warnings.append(line)

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables to start `catenary up` with, beside those of `environment`.

        Raises ConfigError.
        """
        set_by_name = {name for name, value in environment.items() if value} | self._asked.keys()
        own = {
            name.removeprefix(prefix).lower(): value
            for prefix in (UP, ENGINE)
            for name, value in {**environment, **self._asked}.items()
            if name.startswith(prefix) and value
        }
        # Ranges that would choose a strategy where none is named leave that of the script, which takes them.
        taken = {
            name.upper()
            for name, item in translate(environment, own).options.items()
            if name != "bucketing_strategy" or item.origin in STRATEGY_VARIABLES
        }
        kept = {
            name: value
            for name, (value, beside) in self._defaults.items()
            if not any(_is_set(other, set_by_name, taken) for other in (name, beside))
        }
        return kept | self._asked

    @staticmethod
    def flags(variables: Mapping[str, str]) -> list[str]:
        """Return the variables that are options of `catenary up`, except keys, as its flags."""
        return [
            word
            for name, value in sorted(variables.items())
            if name.startswith(UP) and name != API_KEY
            for word in (f"--{name.removeprefix(UP).lower().replace('_', '-')}", value)
        ]

    @classmethod
    def command(cls, variables: Mapping[str, str]) -> str:
        """Return the same start as one would type it; keys are not shown."""
        words = [
            f"{name}={'...' if name == API_KEY else shlex.quote(value)}"
            for name, value in sorted(variables.items())
            if not name.startswith(UP) or name == API_KEY
        ]
        return " ".join([*words, "catenary up", *map(shlex.quote, cls.flags(variables))])


def _is_set(variable: str, names: Collection[str], options: Collection[str]) -> bool:
    """Return whether a variable has a value already: the deployment's, the engine's, or vLLM's for it."""
    for prefix in (UP, ENGINE):
        if variable.startswith(prefix):
            option = variable.removeprefix(prefix)
            return option in options or variable in names or ENGINE + option in names
    return variable in names
