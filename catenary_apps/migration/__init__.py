"""Options of `vllm serve` and letters of its Gaudi start scripts as options of `catenary up`. Pure."""

from __future__ import annotations

from catenary_apps.migration.launch import ENGINE as ENGINE_PREFIX
from catenary_apps.migration.launch import UP as UP_PREFIX
from catenary_apps.migration.launch import Launch
from catenary_apps.migration.letters import R1_SCRIPT, SCRIPT, Letter, launch_of
from catenary_apps.migration.letters import read as read_letters
from catenary_apps.migration.markdown import tables_markdown
from catenary_apps.migration.serve import GROUPS as SERVE_GROUPS
from catenary_apps.migration.serve import OPTIONS as SERVE_OPTIONS
from catenary_apps.migration.serve import UnknownOptionError, parse_serve
from catenary_apps.migration.serve_options import Kind, ServeOption

__all__ = [
    "ENGINE_PREFIX",
    "R1_SCRIPT",
    "SCRIPT",
    "SERVE_GROUPS",
    "SERVE_OPTIONS",
    "UP_PREFIX",
    "Kind",
    "Launch",
    "Letter",
    "ServeOption",
    "UnknownOptionError",
    "launch_of",
    "parse_serve",
    "read_letters",
    "tables_markdown",
]
