"""How much of a device's free memory goes to activations, graphs and KV. Pure.

The arithmetic of Gaudi users: gpu_memory_utilization scales what is FREE after the weights are loaded, not
the whole device.
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
    """All in bytes. usable = activations + graphs + kv + what a limit leaves unused."""

    total: int
    weights: int
    free: int
    utilization: float
    activations: int
    graphs: int
    graphs_measured: bool
    kv: int

    @property
    def usable(self) -> int:
        """What the engine may take of the free memory."""
        return int(self.free * self.utilization)


def plan_memory(
    *,
    total: int,
    weights: int,
    free: int,
    utilization: float,
    activations: int,
    reserve: GraphReserve,
    kv_bytes: int | None = None,
    kv_limit: int | None = None,
) -> MemoryPlan:
    """Divides `free`, the bytes that are free once the weights are loaded.

    kv_bytes: the operator's size for KV, which may take what the utilization would leave free; kv_limit: no
    more than this unless the operator says so. The result's `kv` may be zero or negative: `plan_kv` refuses
    it with the length that does not fit. Raises InsufficientMemory if `kv_bytes` does not fit.
    """
    usable = int(free * utilization)
    graphs = reserve.bytes_of(usable)
    rest = usable - activations - graphs
    if kv_bytes is None:
        kv = rest if kv_limit is None else min(rest, kv_limit)
    else:
        kv = kv_bytes
        if kv > free - activations - graphs:
            raise InsufficientMemory(
                f"kv-cache-gib {kv / GIB:g} exceeds the memory that is free: {free / GIB:.2f} GiB, of which "
                f"activations take {activations / GIB:.2f} GiB and graphs {graphs / GIB:.2f} GiB: lower it"
            )
    return MemoryPlan(
        total, weights, free, utilization, activations, graphs, reserve.measured is not None, kv
    )
