"""Parse the command line of `vllm serve` into a launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from catenary.config import ConfigError
from catenary.nearest import near
from catenary_apps.migration.launch import Launch
from catenary_apps.migration.serve_options import Kind, ServeOption
from catenary_apps.migration.serve_tables import MODEL_OPTION, MODEL_OPTIONS, RUNNING_OPTIONS, SERVER_OPTIONS

# By heading.
SERVE_GROUPS: Final[Mapping[str, tuple[ServeOption, ...]]] = {
    "Model": MODEL_OPTIONS,
    "Memory, scheduling and execution": RUNNING_OPTIONS,
    "Server and logs": SERVER_OPTIONS,
}
SERVE_OPTIONS: Final[tuple[ServeOption, ...]] = tuple(
    option for group in SERVE_GROUPS.values() for option in group
)
_BY_NAME: Final[Mapping[str, ServeOption]] = {
    name: option for option in SERVE_OPTIONS for name in option.names
}
_MAX_FILE: Final = 1 << 20
_CONFIG: Final = "--config"


class UnknownOptionError(ConfigError):
    """An option that `vllm serve` does not have, or that is not known here; `name`: as it was written."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


def parse_serve(words: Sequence[str], launch: Launch) -> None:
    """Ask the launch for all that the words say: options in any order, and a model without a name.

    A file of options (--config) counts before all others. Raises ConfigError, one line that names the option.
    """
    found = list(_options(words))
    for name, value in found:
        if name == _CONFIG:
            found = [*_options(_from_file(Path(value))), *found]
    # A tokenizer is compared with the model, which may come later.
    found.sort(key=lambda item: item[0] == "--tokenizer")
    for name, value in found:
        if name != _CONFIG:
            _BY_NAME[name].apply(launch, name, value)


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield options by their full names with their text."""
    left, bare = list(words), ""
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            if bare:
                raise ConfigError(
                    f"unexpected argument {word!r}: the model is {bare!r} already, a switch has no value"
                )
            bare = word
            yield MODEL_OPTION, word
            continue
        if word.startswith("-O") and len(word) > 2:
            left.insert(0, word[2:])
            word = "-O"
        written, equals, text = word.partition("=")
        name, negated = _known(written)
        option = _BY_NAME.get(name)
        kind = Kind.VALUE if option is None else option.kind
        if kind is Kind.FLAG:
            if equals:
                raise ConfigError(f"{written}: takes no value")
            yield name, "false" if negated else "true"
        elif equals:
            yield name, text
        elif kind is Kind.VALUE:
            # A value may begin with a dash only as a negative number.
            if not left or (left[0].startswith("-") and not left[0][1:2].isdigit()):
                raise ConfigError(f"{written}: needs a value")
            yield name, left.pop(0)
        else:
            values = []
            while left and not left[0].startswith("-"):
                values.append(left.pop(0))
            if not values:
                raise ConfigError(f"{written}: needs a value")
            yield name, ",".join(values)


def _known(written: str) -> tuple[str, bool]:
    """Return the full name of an option, and whether it was written with --no-. Raises ConfigError."""
    name = written.replace("_", "-") if written.startswith("--") else written
    names = [*_BY_NAME, _CONFIG]
    if name in names:
        return name, False
    flags = {f"--no-{known[2:]}": known for known, option in _BY_NAME.items() if option.kind is Kind.FLAG}
    if name in flags:
        return flags[name], True
    # As vLLM's own parser does: --gpu-memory-util is enough where it is no other option's beginning.
    begun = [known for known in (*names, *flags) if name.startswith("--") and known.startswith(name)]
    if len(begun) == 1:
        return flags.get(begun[0], begun[0]), begun[0] in flags
    if begun:
        raise ConfigError(f"{written}: could be {', '.join(sorted(begun))}")
    hint = near(name, names, quoted=False)
    raise UnknownOptionError(
        written, f"unknown option {written}{hint}: docs/migration.md lists those of vllm serve"
    )


def _from_file(path: Path) -> list[str]:
    """Return the options of a YAML file as words."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE + 1)
        if len(text) > _MAX_FILE:
            raise ConfigError(f"{_CONFIG} {path}: larger than {_MAX_FILE} bytes")
        data: Any = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{_CONFIG} {path}: {error.strerror or 'cannot be read'}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        raise ConfigError(f"{_CONFIG} {path}: not valid YAML") from None
    if not isinstance(data, dict) or any(isinstance(value, dict) for value in data.values()):
        raise ConfigError(f"{_CONFIG} {path}: expected a mapping of options to single values or lists")
    words: list[str] = []
    for key, value in data.items():
        flag = f"--{key}"
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(f"--no-{key}")
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        elif value is not None:
            words.append(f"{flag}={value}")
        elif flag.replace("_", "-") == "--api-key":
            # As `api-key: $KEY` becomes without a KEY: refused like any other empty key.
            words.append("--api-key=")
    return words
