"""Plan of an engine's memory: weights, activations, graphs and KV. Pure numbers; imports no torch."""

from __future__ import annotations

from services.engine.memory.plan import (
    GraphHistory,
    GraphReserve,
    InsufficientMemory,
    KvPlan,
    MemoryPlan,
    ModelFigures,
    estimate_activations,
    estimate_profile,
    history_key,
    memory_table,
    plan_kv,
    plan_memory,
)
from services.engine.memory.shape import (
    ModelShape,
    Quantization,
    WeightScheme,
    active_parameters,
    count_weights,
    heads_per_card,
    read_shape,
    stored_scheme,
)

__all__ = [
    "GraphHistory",
    "GraphReserve",
    "InsufficientMemory",
    "KvPlan",
    "MemoryPlan",
    "ModelFigures",
    "ModelShape",
    "Quantization",
    "WeightScheme",
    "active_parameters",
    "count_weights",
    "estimate_activations",
    "estimate_profile",
    "heads_per_card",
    "history_key",
    "memory_table",
    "plan_kv",
    "plan_memory",
    "read_shape",
    "stored_scheme",
]
