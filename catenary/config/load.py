"""From flags, environment and YAML to a checked configuration, or to one line that says what is wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import ValidationError

from catenary.config.parser import parse_flags
from catenary.config.settings import (
    EMPTY_FILE,
    EMPTY_KEY,
    ConfigError,
    ServiceConfig,
    env_name,
    flag_name,
    holds_keys,
    is_guard,
)
from catenary.config.variables import VARIABLES
from catenary.config.wording import reason, shown
from catenary.nearest import near

# A file of options has a few kilobytes.
MAX_YAML_BYTES = 1 << 20

T = TypeVar("T", bound=ServiceConfig)


@dataclass(frozen=True, slots=True)
class Given:
    """A value and how its operator would find it: a flag, a variable or a key of the file."""

    value: Any
    origin: str


# From what the operator gave, by option name, to options that count where he gave nothing.
Fallback = Callable[[Mapping[str, Any]], Mapping[str, Given]]


def load(cls: type[T], argv: Sequence[str] | None, *, prog: str, fallback: Fallback | None = None) -> T:
    """Read the options of a service.

    Precedence: flags, then environment, then the YAML file, then `fallback`, then defaults. `argv` None: the
    process's own. A bad value, an unknown flag or an unknown YAML key ends the process with code 2 and one
    line on stderr, and so does a ConfigError of `fallback`.
    """
    try:
        return _load(cls, argv, prog=prog, fallback=fallback)
    except ConfigError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        sys.exit(error.exit_code)


def _load(cls: type[T], argv: Sequence[str] | None, *, prog: str, fallback: Fallback | None) -> T:
    flags = parse_flags(cls, argv, prog=prog)
    file = flags.pop("config", None) or os.environ.get(env_name(cls, "config")) or None
    given: dict[str, Given] = {}
    if file is not None:
        given |= _from_yaml(cls, Path(file))
    given |= _from_environment(cls)
    given |= {name: Given(value, flag_name(name)) for name, value in flags.items()}
    if fallback is not None:
        given = dict(fallback({name: item.value for name, item in given.items()})) | given
    try:
        return cls(**{name: item.value for name, item in given.items()})
    except ValidationError as error:
        raise ConfigError(_first_problem(cls, error, given)) from None


def _from_environment(cls: type[ServiceConfig]) -> dict[str, Given]:
    """Leave empty variables out: they were not set, except for keys and what stands for them: an empty one
    must not open the door."""
    names = {name: env_name(cls, name) for name in cls.model_fields}
    return {
        name: Given(os.environ[env], env)
        for name, env in names.items()
        if os.environ.get(env) or (env in os.environ and _lets_in(cls, name))
    }


def _lets_in(cls: type[ServiceConfig], name: str) -> bool:
    return is_guard(name) or holds_keys(name, cls.model_fields[name])


def check_variables(cls: type[ServiceConfig], environment: Mapping[str, str]) -> None:
    """Check the variables of a class each for itself, as a program does that starts this one later.

    Raises ConfigError, one line that names the variable. What options say of one another is not looked at.
    """
    for name, field in cls.model_fields.items():
        value = environment.get(env_name(cls, name))
        if value is None or (not value and not _lets_in(cls, name)):
            continue
        try:
            cls.__pydantic_validator__.validate_assignment(cls.model_construct(), name, value)
        except ValidationError as error:
            mine = [problem for problem in error.errors(include_url=False) if problem["loc"][:1] == (name,)]
            if mine:
                given = f"{env_name(cls, name)}{shown(name, field, value)}"
                raise ConfigError(f"{given}: {reason(name, field, mine[0])}") from None


def _from_yaml(cls: type[ServiceConfig], path: Path) -> dict[str, Given]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_YAML_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or 'cannot be read'}") from None
    if len(text) > MAX_YAML_BYTES:
        raise ConfigError(f"--config {path}: larger than {MAX_YAML_BYTES} bytes")
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise ConfigError(f"--config {path}: not valid YAML{where}") from None
    if not isinstance(data, dict | None):
        raise ConfigError(f"--config {path}: expected a mapping of options")
    given: dict[str, Given] = {}
    for key, value in (data or {}).items():
        name = str(key).replace("-", "_")
        if name not in cls.model_fields:
            raise ConfigError(f"--config {path}: unknown option {str(key)!r}{near(name, cls.model_fields)}")
        if value in (None, []) and _lets_in(cls, name):
            # A list without entries, or no value, is as easily left behind by a template as an empty text.
            raise ConfigError(f"{key} in {path}: {EMPTY_FILE if is_guard(name) else EMPTY_KEY}")
        given[name] = Given(value, f"{key} in {path}")
    return given


def _first_problem(cls: type[ServiceConfig], error: ValidationError, given: dict[str, Given]) -> str:
    problems = error.errors(include_url=False)
    problem = problems[0]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if not problem["loc"]:
        return reason("", None, problem) + more
    name = str(problem["loc"][0])
    field = cls.model_fields.get(name)
    item = given.get(name)
    origin = item.origin if item else flag_name(name)
    if problem["type"] == "missing" and len(problem["loc"]) == 1:
        return f"{origin} is required{more}"
    value = shown(name, field, item.value) if item is not None else ""
    return f"{origin}{value}: {reason(name, field, problem)}{more}"


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
    """Return one line for each set CATENARY_* variable that nothing reads, with one of these prefixes or
    none.

    The line names the nearest known variable and not the value, which may be a secret.
    """
    others = tuple(prefix for prefix in VARIABLES if prefix not in prefixes)
    return tuple(
        f"{name} is not a variable that anything reads{near(name, _KNOWN, quoted=False)}"
        for name in sorted(environment)
        if name.startswith(PREFIX) and environment[name] and name not in _KNOWN
        if not name.startswith(others)
    )
