"""Moving over from vLLM on Gaudi: its variables, its options and its start scripts. Pure."""

from __future__ import annotations

from catenary.migration.loading import load_moved
from catenary.migration.markdown import tables_markdown
from catenary.migration.rows import Row, Status
from catenary.migration.translation import VARIABLES, Translation, row_of, translate

__all__ = [
    "VARIABLES",
    "Row",
    "Status",
    "Translation",
    "load_moved",
    "row_of",
    "tables_markdown",
    "translate",
]
