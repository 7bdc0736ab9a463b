"""Which class executes a mode."""

from __future__ import annotations

from services.engine.device.hpu.bridge import Bridge
from services.engine.device.hpu.buffers import PersistentBuffers
from services.engine.device.hpu.execution.base import Execution
from services.engine.device.hpu.execution.compiled import CompiledExecution
from services.engine.device.hpu.execution.graph import GraphExecution
from services.engine.device.hpu.execution.lazy import LazyExecution
from services.engine.device.hpu.settings import HpuSettings
from services.engine.device.modes import ExecutionMode

_CLASSES: dict[ExecutionMode, type[Execution]] = {
    ExecutionMode.EAGER: Execution,
    ExecutionMode.LAZY: LazyExecution,
    ExecutionMode.GRAPH: GraphExecution,
    ExecutionMode.COMPILE: CompiledExecution,
}


def execution_for(
    mode: ExecutionMode, bridge: Bridge, settings: HpuSettings, buffers: PersistentBuffers
) -> Execution:
    """The execution of a mode."""
    return _CLASSES[mode](bridge, settings, buffers)
