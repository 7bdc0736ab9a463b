"""Moving over from vLLM on Gaudi: its variables, its options and its start scripts. Pure."""

from __future__ import annotations

from catenary.migration.launch import ENGINE as ENGINE_PREFIX
from catenary.migration.launch import UP as UP_PREFIX
from catenary.migration.launch import Launch
from catenary.migration.letters import R1_SCRIPT, SCRIPT, Letter, launch_of
from catenary.migration.letters import read as read_letters
from catenary.migration.loading import Shared, load_moved, load_shared
from catenary.migration.markdown import tables_markdown
from catenary.migration.rows import Row, Status
from catenary.migration.serve import GROUPS as SERVE_GROUPS
from catenary.migration.serve import OPTIONS as SERVE_OPTIONS
from catenary.migration.serve import Kind, ServeOption, UnknownOptionError, parse_serve
from catenary.migration.translation import VARIABLES, row_of, translate

__all__ = [
    "ENGINE_PREFIX",
    "R1_SCRIPT",
    "SCRIPT",
    "SERVE_GROUPS",
    "SERVE_OPTIONS",
    "UP_PREFIX",
    "VARIABLES",
    "Kind",
    "Launch",
    "Letter",
    "Row",
    "ServeOption",
    "Shared",
    "Status",
    "UnknownOptionError",
    "launch_of",
    "load_moved",
    "load_shared",
    "parse_serve",
    "read_letters",
    "row_of",
    "tables_markdown",
    "translate",
]
