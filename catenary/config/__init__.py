"""Options of a service: flags over environment over YAML over defaults, and one line when one is wrong."""

from __future__ import annotations

from catenary.config.listening import CLIENT_SECRET_ENV, ENGINE_SECRET_ENV, ListenOptions
from catenary.config.load import SERVICE_PREFIXES, Given, check_variables, load, unknown_variables
from catenary.config.parser import build_parser, options_markdown, parse_flags
from catenary.config.settings import (
    EMPTY_KEY,
    ConfigError,
    Expert,
    ServiceConfig,
    env_name,
    flag_name,
    option_of,
    settings,
)
from catenary.config.variables import VARIABLES
from catenary.config.wording import expected_one_of, reason

__all__ = [
    "CLIENT_SECRET_ENV",
    "EMPTY_KEY",
    "ENGINE_SECRET_ENV",
    "SERVICE_PREFIXES",
    "VARIABLES",
    "ConfigError",
    "Expert",
    "Given",
    "ListenOptions",
    "ServiceConfig",
    "build_parser",
    "check_variables",
    "env_name",
    "expected_one_of",
    "flag_name",
    "load",
    "option_of",
    "options_markdown",
    "parse_flags",
    "reason",
    "settings",
    "unknown_variables",
]
