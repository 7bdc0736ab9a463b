"""Variables with our prefix that nothing reads: most often a typing error that would go unnoticed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from catenary.config.variables import VARIABLES
from catenary.nearest import near

PREFIX: Final = "CATENARY_"
SERVICE_PREFIXES: Final = ("CATENARY_GATEWAY_", "CATENARY_ROUTER_", "CATENARY_TOKENIZER_", "CATENARY_ENGINE_")
# Read by programs that have no option class, or by more than one program.
_GENERAL: Final = (
    "CATENARY_CACHE",
    "CATENARY_CLIENT_SECRET",
    "CATENARY_ENGINE_SECRET",
    "CATENARY_SIM",
    "CATENARY_HEALTHCHECK_CA",
    "CATENARY_HEALTHCHECK_CERT",
    "CATENARY_HEALTHCHECK_KEY",
)
_KNOWN: Final = frozenset(
    (*_GENERAL, *(f"{prefix}{name.upper()}" for prefix, names in VARIABLES.items() for name in names))
)


def unknown_variables(environment: Mapping[str, str], prefixes: Collection[str]) -> tuple[str, ...]:
    """One line for each set CATENARY_* variable that nothing reads, with one of these prefixes or none.

    The line names the nearest known variable and not the value, which may be a secret.
    """
    others = tuple(prefix for prefix in VARIABLES if prefix not in prefixes)
    return tuple(
        f"{name} is not a variable that anything reads{near(name, _KNOWN, quoted=False)}"
        for name in sorted(environment)
        if name.startswith(PREFIX) and environment[name] and name not in _KNOWN
        if not name.startswith(others)
    )
