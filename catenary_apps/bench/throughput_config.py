"""The options of `catenary bench throughput`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from catenary.config import settings
from catenary_apps.bench.prompts_config import PromptsConfig


class BenchThroughputConfig(PromptsConfig):
    """A batch of prompts in this process. Options of the engine come last, after --."""

    model_config = settings(prefix="CATENARY_BENCH_")

    model: str = Field(
        "smollm2", min_length=1, description="Model: an alias, a directory, a GGUF file or a hub's id."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="Lowest level that is logged."
    )
    warmup: int = Field(1, ge=0, le=100_000, description="Prompts before, which are not counted.")
