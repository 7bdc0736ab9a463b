"""How much of a device's free memory goes to activations, graphs and KV. Pure.

The arithmetic of Gaudi users: gpu_memory_utilization scales what is FREE once the weights are loaded and the
largest forward has its activations, not the whole device; graph_reserved_mem is a share of that; the rest is
KV. The padding block is not part of the KV: it lies in what the utilization leaves free.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.memory.errors import GIB, InsufficientMemory


@dataclass(frozen=True, slots=True)
class GraphReserve:
    """Memory set aside for graphs: `share` of the usable memory until a run has measured them.

    `measured` is what the last run with the same shapes needed, in bytes. Devices without graphs have
    neither.
    """

    share: float = 0.0
    measured: int | None = None

    # Captures of the same shapes do not take exactly the same memory twice.
    HEADROOM = 1.1

    def bytes_of(self, usable: int) -> int:
        """The reserve; a measurement counts up to half of the usable memory."""
        if self.measured is None:
            return int(usable * self.share)
        return min(int(self.measured * self.HEADROOM), usable // 2)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All in bytes. free = activations + available; usable = graphs + kv + what a limit leaves unused.

    `free`: with the weights loaded; `activations`: of the largest forward.
    """

    total: int
    weights: int
    free: int
    utilization: float
    activations: int
    graphs: int
    graphs_measured: bool
    kv: int

    @property
    def available(self) -> int:
        """What is free beside weights and activations: what vLLM logs as free device memory."""
        return max(0, self.free - self.activations)

    @property
    def usable(self) -> int:
        """What graphs and KV may take of that."""
        return int(self.available * self.utilization)


def plan_memory(
    *,
    total: int,
    weights: int,
    free: int,
    utilization: float,
    activations: int,
    reserve: GraphReserve,
    padding: int = 0,
    kv_bytes: int | None = None,
    kv_limit: int | None = None,
) -> MemoryPlan:
    """Divides `free`, the bytes that are free once the weights are loaded.

    padding: bytes of the padding block; kv_bytes: the operator's size for KV, which may take what the
    utilization would leave free; kv_limit: no more than this unless the operator says so. The result's `kv`
    may be zero or negative: `plan_kv` refuses it with the length that does not fit. Raises InsufficientMemory
    if `kv_bytes` does not fit.
    """
    usable = int(max(0, free - activations) * utilization)
    graphs = reserve.bytes_of(usable)
    # A utilization of 1 leaves nothing for the padding block.
    room = free - activations - graphs - padding
    rest = min(usable - graphs, room)
    if kv_bytes is None:
        kv = rest if kv_limit is None else min(rest, kv_limit)
    else:
        kv = kv_bytes
        if kv > room:
            raise InsufficientMemory(
                f"kv-cache-gib {kv / GIB:g} exceeds the memory that is free: {free / GIB:.2f} GiB, of which "
                f"activations take {activations / GIB:.2f} GiB, graphs {graphs / GIB:.2f} GiB and the "
                f"padding block {padding / GIB:.2f} GiB: lower it"
            )
    return MemoryPlan(
        total, weights, free, utilization, activations, graphs, reserve.measured is not None, kv
    )
