"""Variables with our prefix that nothing reads: most often a typing error that would go unnoticed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from catenary.config.settings import ServiceConfig, env_name
from catenary.nearest import near

PREFIX = "CATENARY_"
# Read by programs that have no option class, or by more than one program.
_GENERAL = (
    "CATENARY_CACHE",
    "CATENARY_CLIENT_SECRET",
    "CATENARY_ENGINE_SECRET",
    "CATENARY_SIM",
    "CATENARY_HEALTHCHECK_CA",
    "CATENARY_HEALTHCHECK_CERT",
    "CATENARY_HEALTHCHECK_KEY",
)
# Programs whose option classes the others do not load: each looks after its own variables.
_PROGRAMS = (
    *("UP", "CHAT", "BUCKETS", "PLAN", "PROFILE", "BENCH", "TOP", "FLEET", "DRAIN", "DOCTOR"),
    *("GATEWAY", "ROUTER", "TOKENIZER", "ENGINE"),
)


def unknown_variables(
    environment: Mapping[str, str], classes: Iterable[type[ServiceConfig]]
) -> tuple[str, ...]:
    """One line for each set CATENARY_* variable that no option of `classes` has and no other program reads.

    The line names the nearest known variable and not the value, which may be a secret.
    """
    known, prefixes = set(_GENERAL), set[str]()
    for cls in classes:
        known |= {env_name(cls, name) for name in (*cls.model_fields, "config")}
        prefixes.add(str(cls.model_config.get("env_prefix", "")))
    foreign = {f"{PREFIX}{program}_" for program in _PROGRAMS} - prefixes
    return tuple(
        f"{name} is not a variable that anything reads{near(name, known, quoted=False)}"
        for name in sorted(environment)
        if name.startswith(PREFIX) and environment[name] and name not in known
        if not any(name.startswith(prefix) for prefix in foreign)
    )
