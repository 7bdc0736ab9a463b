"""Where an engine's memory goes: weights, activations, graphs and KV. Pure numbers; imports no torch."""

from __future__ import annotations

from services.engine.memory.errors import InsufficientMemory
from services.engine.memory.estimate import ModelFigures, estimate_activations, estimate_profile
from services.engine.memory.history import GraphHistory, history_key
from services.engine.memory.kv import KvPlan, plan_kv
from services.engine.memory.plan import GraphReserve, MemoryPlan, plan_memory
from services.engine.memory.shape import ModelShape, Quantization, read_shape
from services.engine.memory.table import memory_table
from services.engine.memory.weights import (
    WeightScheme,
    active_parameters,
    count_weights,
    heads_per_card,
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
