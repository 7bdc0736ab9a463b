"""vLLM's environment variables (VLLM_*, PT_HPU_*) as options of the engine. Imports no torch and no gRPC."""

from __future__ import annotations

from services.engine.vllm_variables.buckets import STRATEGY_VARIABLES
from services.engine.vllm_variables.rows import Row, Status
from services.engine.vllm_variables.translation import (
    VARIABLES,
    Shared,
    load_moved,
    load_shared,
    row_of,
    translate,
)

__all__ = [
    "STRATEGY_VARIABLES",
    "VARIABLES",
    "Row",
    "Shared",
    "Status",
    "load_moved",
    "load_shared",
    "row_of",
    "translate",
]
