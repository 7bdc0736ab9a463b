"""The base of every service's configuration."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import Field, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError
from pydantic_core.core_schema import ValidationInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from catenary.runtime import StartRefused

_LISTS = (list, tuple, set, frozenset)
# The refusal of an empty key: it would open the server to everyone.
EMPTY_KEY = "has an empty entry; leave the option out (unset the variable) to have none"
EMPTY_FILE = "names no file; leave the option out (unset the variable) to have none"
# Files that decide about access: keys, secrets, and the CA of client certificates.
_GUARDS = ("api_key_file", "secret_file", "ssl_ca_certs")


class ConfigError(StartRefused):
    """An option is missing, unknown or bad. The text is one line that names the option."""

    exit_code = 2


def settings(prefix: str) -> SettingsConfigDict:
    """Return the `model_config` of a service's options; `prefix` is that of its environment variables."""
    return SettingsConfigDict(
        env_prefix=prefix,
        # Compose writes VAR=${VAR:-}: an empty variable is one that was not set.
        env_ignore_empty=True,
        # Lists are comma separated, not JSON.
        enable_decoding=False,
        extra="forbid",
        frozen=True,
        validate_default=True,
        # inf and nan pass for numbers, and JSON, in which options go to other processes, has neither.
        allow_inf_nan=False,
    )


class Expert(str):
    """The heading of options whose defaults serve nearly all deployments: the documents put them apart."""

    __slots__ = ()


class ServiceConfig(BaseSettings):
    """Options that every service has. Subclasses are flat, and each field has a description.

    Built directly, it takes keyword arguments, then the environment, then defaults.
    """

    model_config = settings("CATENARY_")

    # The options' groups in --help and the documents: the field that a group begins with, and its heading.
    headings: ClassVar[Mapping[str, str]] = {"log_level": "Logs"}

    # The field that words without a flag set, as in `catenary up MODEL`; empty: there are none.
    positional: ClassVar[str] = ""

    # For programs that start others: how to set an option that is one of theirs.
    elsewhere: ClassVar[str] = ""

    @classmethod
    def elsewhere_for(cls, flag: str) -> str:
        """Return how to set an option of another program, which `cls` does not have; empty if none has it."""
        return ""

    @classmethod
    def elsewhere_flags(cls) -> Iterable[str]:
        """Return the options for which `elsewhere_for` has an answer."""
        return ()

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level that is logged."
    )
    log_format: Literal["text", "json"] = Field("text", description="Log lines for people or for collectors.")

    @field_validator("*", mode="before")
    @classmethod
    def _from_text(cls, value: Any, info: ValidationInfo) -> Any:
        """Read the text of flags, variables and YAML: lists by comma, absence by an empty text.

        A list of keys has no empty entry: `--api-key "$KEY"` without a KEY must not open the server, nor must
        `--api-key-file "$FILE"` without a FILE. Nor is an empty text absence where a least length is
        declared: `--served-model-name "$NAME"` without a NAME.
        """
        if info.field_name is None:
            return value
        field = cls.model_fields[info.field_name]
        if holds_keys(info.field_name, field):
            return _secrets(value)
        kinds = _alternatives(field)
        if isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds):
            # YAML's yes is no 1.
            raise PydanticKnownError("int_type")
        if not isinstance(value, str):
            return value
        if is_guard(info.field_name) and not value.strip():
            raise ValueError(EMPTY_FILE)
        if is_list(field):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return None if not value and is_optional(field) and not has_least_length(field) else value


def _secrets(value: Any) -> Any:
    entries = tuple(value.split(",")) if isinstance(value, str) else value
    if not isinstance(entries, (list, tuple, set, frozenset)):
        return value
    stripped = tuple(entry.strip() if isinstance(entry, str) else entry for entry in entries)
    if not all(stripped):
        raise ValueError(EMPTY_KEY)
    return stripped


def option_of(cls: type[ServiceConfig], name: str, **changed: Any) -> Any:
    """Return the field of an option that another class declares, for a class that has the same option.

    Bounds, default and description are those of the declaration, but for `changed`: `default`, and
    `description` where the option of this program does something else.
    """
    field = copy(cls.model_fields[name])
    for attribute, value in changed.items():
        setattr(field, attribute, value)
    return field


def env_name(cls: type[ServiceConfig], field_name: str) -> str:
    """Environment variable of a field."""
    return f"{cls.model_config.get('env_prefix', '')}{field_name.upper()}"


def flag_name(field_name: str) -> str:
    """Command line flag of a field."""
    return "--" + field_name.replace("_", "-")


def _alternatives(field: FieldInfo) -> tuple[Any, ...]:
    """Return the members of the field's type, a union taken apart."""
    annotation = field.annotation
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def is_optional(field: FieldInfo) -> bool:
    """Return whether None is a value of the field."""
    return type(None) in _alternatives(field)


def is_boolean(field: FieldInfo) -> bool:
    """Return whether the field is a switch."""
    return bool in _alternatives(field)


def is_list(field: FieldInfo) -> bool:
    """Return whether the field holds several values."""
    return any((get_origin(kind) or kind) in _LISTS for kind in _alternatives(field))


def has_least_length(field: FieldInfo) -> bool:
    """Return whether the field was declared with a `min_length`."""
    return any(getattr(part, "min_length", 0) for part in field.metadata)


def holds_keys(field_name: str, field: FieldInfo) -> bool:
    """Return whether the field is a list of secrets, as API keys are: no entry of it may be empty."""
    return is_list(field) and is_secret(field_name, field)


def is_guard(field_name: str) -> bool:
    """Return whether the field names a file without which more people may come in: no empty text is its
    absence."""
    return field_name.endswith(_GUARDS)


def is_secret(field_name: str, field: FieldInfo) -> bool:
    """Return whether the field's value must not be shown: it is a secret itself, not a file of one."""
    if field_name.endswith(("_file", "_dir")) or "Path" in str(field.annotation):
        return False
    return "Secret" in str(field.annotation) or any(
        word in field_name for word in ("secret", "api_key", "operator_key", "password")
    )
