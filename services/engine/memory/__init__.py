"""Where an engine's memory goes: weights, activations, graphs and KV. Pure numbers; imports no torch."""

from __future__ import annotations

from services.engine.memory.errors import InsufficientMemory
from services.engine.memory.estimate import ModelFigures, estimate_activations
from services.engine.memory.history import GraphHistory, history_key
from services.engine.memory.kv import KvPlan, plan_kv
from services.engine.memory.plan import GraphReserve, MemoryPlan, plan_memory
from services.engine.memory.table import memory_table

__all__ = [
    "GraphHistory",
    "GraphReserve",
    "InsufficientMemory",
    "KvPlan",
    "MemoryPlan",
    "ModelFigures",
    "estimate_activations",
    "history_key",
    "memory_table",
    "plan_kv",
    "plan_memory",
]
