"""From the environment of a vLLM on Gaudi to our options and warnings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from catenary.config import Given
from catenary.nearest import near
from services.engine.vllm_variables.absent import ROWS as ABSENT
from services.engine.vllm_variables.attention import ROWS as ATTENTION
from services.engine.vllm_variables.buckets import ROWS as BUCKETS
from services.engine.vllm_variables.cpu import ROWS as CPU
from services.engine.vllm_variables.execution import ROWS as EXECUTION
from services.engine.vllm_variables.hpu import ROWS as HPU
from services.engine.vllm_variables.memory import ROWS as MEMORY
from services.engine.vllm_variables.rows import Row, Status
from services.engine.vllm_variables.serving import ROWS as SERVING
from services.engine.vllm_variables.variables import Variables

VARIABLES: Final[tuple[Row, ...]] = (
    *BUCKETS,
    *MEMORY,
    *EXECUTION,
    *CPU,
    *HPU,
    *ATTENTION,
    *SERVING,
    *ABSENT,
)
# Variables that begin so are vLLM's or the Gaudi bridge's, and are spoken of if no row knows them.
PREFIXES: Final = ("VLLM_", "PT_HPU_")
_RULES: Final = tuple(dict.fromkeys(row.rule for row in VARIABLES if row.rule is not None))


@dataclass(frozen=True, slots=True)
class Translation:
    """Engine and deployment options by name, each with the variable that it comes from, and a line for every
    variable that has no effect or not the one that it seems to have."""

    options: Mapping[str, Given]
    warnings: tuple[str, ...]


def translate(environment: Mapping[str, str], own: Mapping[str, Any] | None = None) -> Translation:
    """Reads the variables of the table.

    `own` is what the operator gave by our own options: those win, and options that go with them are left
    out. Raises ConfigError, one line that names the variable, for a value that cannot be read. Values are
    never repeated in warnings: some are secrets.
    """
    variables = Variables(environment, own or {})
    for rule in _RULES:
        rule(variables)
    for name in sorted(environment):
        if environment[name].strip():
            _speak_of(name, variables)
    return Translation(dict(variables.options), tuple(variables.warnings))


def row_of(name: str) -> Row | None:
    """The row that speaks of a variable; an exact name goes before a pattern."""
    exact = next((row for row in VARIABLES if name in row.names), None)
    return exact or next((row for row in VARIABLES if row.matches(name)), None)


def _speak_of(name: str, variables: Variables) -> None:
    row = row_of(name)
    if row is None:
        if name.startswith(PREFIXES):
            variables.warn(f"{name} is not known here and has no effect{_hint(name)}")
    elif not row.status.has_effect and row.rule is None:
        verb = "has no effect" if row.status is Status.NOT_NEEDED else "has no effect, its equivalent is here"
        variables.warn(f"{name} {verb}: {row.note.replace('`', '')}")


def _hint(name: str) -> str:
    known = (name for row in VARIABLES for name in row.names if "*" not in name)
    return near(name, known, likeness=0.85, quoted=False)
