"""A row of the tables: what becomes of a variable, an option or a letter of vLLM on Gaudi."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

from catenary.config import flag_name
from services.engine.options import vllm_variable
from services.engine.vllm_variables.variables import Variables

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
    """A row of variables for which there is nothing to do."""
    return Row(names, Status.NOT_NEEDED, note)


def equivalent(note: str, *names: str) -> Row:
    """A row of variables whose work something else does."""
    return Row(names, Status.EQUIVALENT, note)


def passed_on(note: str, test: str, *names: str) -> Row:
    """A row of variables that reach the vendor's software or the hub's library as they are."""
    return Row(names, Status.PASSED_ON, note, test=test)
