"""Execution by torch.compile with the vendor's backend. Source: docs/gaudi-facts.md 2.2 and 4.1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from services.engine.device.base import DeviceError, Forward, Function
from services.engine.device.hpu.bridge import Bridge
from services.engine.device.hpu.buffers import PersistentBuffers
from services.engine.device.hpu.execution.base import Execution
from services.engine.device.hpu.leftovers import ModuleTensors
from services.engine.device.hpu.settings import HpuSettings

_BACKEND = "hpu_backend"
# Entries of dynamo's cache for each bucket: one for each kind of region that shares code. Whole forwards are
# one. Beyond its limit, 8 by default, dynamo stops compiling without a word.
_ENTRIES_REGIONAL = 5
_ENTRIES_WHOLE = 3
_ACCUMULATED = 8
# Stages of sampling have shapes of their own, whose number does not follow from the buckets'.
_LEAST_ENTRIES = 64


class CompiledExecution(Execution):
    """COMPILE: layers, norms and the head are compiled for each bucket; what lies between them is eager."""

    def __init__(self, bridge: Bridge, settings: HpuSettings, buffers: PersistentBuffers) -> None:
        super().__init__(bridge, settings, buffers)
        self._before = _compiled_graphs()
        self.expect_shapes(0)

    def compile(self, function: Function) -> Function:
        compiled: Any = torch.compile(
            function,
            backend=_BACKEND,
            dynamic=False,
            fullgraph=self.settings.compile_fullgraph,
            options={"force_static_compile": True},
        )
        result: Function = compiled
        return result

    def expect_shapes(self, count: int) -> None:
        each = _ENTRIES_REGIONAL if self.settings.regional_compilation else _ENTRIES_WHOLE
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, _LEAST_ENTRIES, 1 + each * count)
        config.accumulated_recompile_limit = max(
            config.accumulated_recompile_limit, _ACCUMULATED * config.recompile_limit
        )

    def run_eagerly(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return forward(*tensors)

    @contextmanager
    def warming(self, modules: Iterable[nn.Module] = ()) -> Iterator[None]:
        """Compiles without running where the bridge can; what forwards leave behind then is garbage."""
        if self.bridge.setting is None or not self.settings.compile_only_warmup:
            yield
            return
        tensors = ModuleTensors(modules)
        try:
            with self.bridge.setting("PT_COMPILE_ONLY_MODE", True):
                yield
                self.bridge.hpu.synchronize()
        finally:
            self.buffers.clear()
        if left := tensors.changed(self.buffers.alive()):
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise DeviceError(
                f"the model keeps {', '.join(left[:3])}{more} of the warm-up, which compiled without running "
                "and left garbage there: start with --compile-only-warmup false"
            )

    def counters(self) -> dict[str, int]:
        return {"backend_compilations": _compiled_graphs() - self._before}


def _compiled_graphs() -> int:
    """How many graphs dynamo has given to the backend in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
