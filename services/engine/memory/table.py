"""The memory plan as lines for people."""

from __future__ import annotations

from services.engine.memory.errors import GIB
from services.engine.memory.kv import KvPlan
from services.engine.memory.plan import MemoryPlan

_MIB = 2**20


def memory_table(plan: MemoryPlan, kv: KvPlan, *, block_bytes: int, activations_measured: bool) -> list[str]:
    """One line per use."""
    pool = kv.num_blocks * block_bytes
    rows = [
        ("device", plan.total, ""),
        ("weights", plan.weights, ""),
        ("free with weights loaded", plan.free, ""),
        ("activations", plan.activations, "measured" if activations_measured else "estimated"),
        ("usable", plan.usable, f"gpu-memory-utilization {plan.utilization:g}"),
        ("graphs", plan.graphs, "measured by the last run" if plan.graphs_measured else "reserved"),
        ("KV padding block", block_bytes, ""),
        ("KV cache", pool, f"{kv.num_blocks} blocks, sequences of up to {kv.max_model_len} tokens"),
    ]
    return [
        f"{name:<26}{_size(size)}  {note}".rstrip() for name, size, note in rows if size or name != "graphs"
    ]


def _size(count: int) -> str:
    value, unit = (count / GIB, "GiB") if abs(count) >= GIB // 10 else (count / _MIB, "MiB")
    return f"{value:>9.2f} {unit}"
