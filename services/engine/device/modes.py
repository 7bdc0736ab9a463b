"""How forwards are executed: as graphs, compiled, lazily or one kernel at a time."""

from __future__ import annotations

from enum import Enum


class ExecutionMode(Enum):
    """The four modes of Gaudi users; the other devices know the ones that make sense there.

    GRAPH: each bucket is recorded once and replayed. COMPILE: a compiler makes code for each bucket. LAZY:
    the device collects operations until a result is needed (Gaudi alone). EAGER: one kernel after the other.
    """

    GRAPH = "graph"
    COMPILE = "compile"
    LAZY = "lazy"
    EAGER = "eager"

    @property
    def captures(self) -> bool:
        """True if a bucket has to be captured before it runs at its full speed."""
        return self in (ExecutionMode.GRAPH, ExecutionMode.COMPILE)


def execution_mode(
    device: str, *, compiled: bool, enforce_eager: bool, lazy: str | None = None
) -> ExecutionMode:
    """The mode that follows from the options `compile` and `enforce_eager`; `lazy` is PT_HPU_LAZY_MODE.

    Only an HPU, real or simulated, reads `lazy`, with the meaning that Habana's bridge gives it: "0" (and
    absent) or "1". Raises ValueError for contradictions.
    """
    if compiled and enforce_eager:
        raise ValueError("compile and enforce-eager exclude each other: choose one")
    if device in ("hpu", "sim"):
        return _hpu_mode(compiled=compiled, enforce_eager=enforce_eager, lazy=lazy)
    if compiled:
        return ExecutionMode.COMPILE
    # A CPU has no graphs to replay: its kernels are the default.
    return ExecutionMode.EAGER if enforce_eager or device == "cpu" else ExecutionMode.GRAPH


def _hpu_mode(*, compiled: bool, enforce_eager: bool, lazy: str | None) -> ExecutionMode:
    if lazy not in (None, "0", "1"):
        raise ValueError(f"PT_HPU_LAZY_MODE must be 0 or 1, not {lazy!r}")
    if lazy == "1":
        if compiled:
            raise ValueError("compile and PT_HPU_LAZY_MODE=1 exclude each other: unset one")
        return ExecutionMode.LAZY if enforce_eager else ExecutionMode.GRAPH
    return ExecutionMode.EAGER if enforce_eager else ExecutionMode.COMPILE
