"""Turn buckets into something replayable, and knows which of them are."""

from __future__ import annotations

from services.engine.graphs.budget import (
    CaptureOrder,
    CaptureSchedule,
    Purse,
    Shape,
    count_shapes,
    shapes_in_order,
    split_long,
)
from services.engine.graphs.code_cache import CodeCache
from services.engine.graphs.graphs import Graphs, Key, PaddingCounter, Phase, PhaseWork, name_of, size_of
from services.engine.graphs.warmup import BackgroundWarmUp, WarmUp, WarmUpReport

__all__ = [
    "BackgroundWarmUp",
    "CaptureOrder",
    "CaptureSchedule",
    "CodeCache",
    "Graphs",
    "Key",
    "PaddingCounter",
    "Phase",
    "PhaseWork",
    "Purse",
    "Shape",
    "WarmUp",
    "WarmUpReport",
    "count_shapes",
    "name_of",
    "shapes_in_order",
    "size_of",
    "split_long",
]
