"""Options of a service: flags over environment over YAML over defaults, and one line when one is wrong."""

from __future__ import annotations

from catenary.config.describe import options_markdown
from catenary.config.load import load
from catenary.config.settings import ConfigError, ServiceConfig, env_name, flag_name, settings

__all__ = ["ConfigError", "ServiceConfig", "env_name", "flag_name", "load", "options_markdown", "settings"]
