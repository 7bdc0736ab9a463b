"""The HPU: Intel Gaudi 2 and 3 through Habana's PyTorch bridge."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity

from catenary.gaudi import needs_float32_scores
from services.engine.device.base import Device, Forward, Function
from services.engine.device.features import NO_FEATURES, AttentionFeatures
from services.engine.device.hpu import kernels
from services.engine.device.hpu.attention_decode import attend_decode
from services.engine.device.hpu.attention_prefill import attend_prefill
from services.engine.device.hpu.bridge import Bridge
from services.engine.device.hpu.buffers import PersistentBuffers
from services.engine.device.hpu.copies import EventCopy, PinnedMemory
from services.engine.device.hpu.dtypes import DtypeChoice
from services.engine.device.hpu.execution import execution_for
from services.engine.device.hpu.memory import hbm_figures, measure_hbm, says_full
from services.engine.device.hpu.probing import Kernels, for_model
from services.engine.device.hpu.properties import HpuProperties
from services.engine.device.hpu.settings import HpuSettings
from services.engine.device.hpu.steps import COMPILATIONS, FALLBACKS, StepMetrics
from services.engine.device.memory import MemoryFigures, MemoryUse
from services.engine.device.modes import ExecutionMode
from services.engine.device.profiling import Event, torch_activities
from services.engine.device.work import FinishedCopy, HostCopy


class HpuDevice(Device):
    """One card, which this process has acquired: `open_hpu` makes it.

    The card has a queue of its own: the caller's thread enqueues and goes on.
    """

    name = "hpu"
    # There is no float64 on the card.
    wide_dtype = torch.float32
    static_shapes = True
    groups_products = False
    default_block_size = 128

    def __init__(
        self,
        bridge: Bridge,
        properties: HpuProperties,
        mode: ExecutionMode,
        settings: HpuSettings,
        kernels: Kernels,
    ) -> None:
        super().__init__(mode)
        # Not before the bridge is loaded, which registers the name with torch.
        self.torch_device = torch.device("hpu")
        self.kernels = kernels
        self.properties = properties
        self.settings = settings
        self._bridge = bridge
        self._buffers = PersistentBuffers()
        self._execution = execution_for(mode, bridge, settings, self._buffers)
        self._steps = StepMetrics(bridge.metrics, settings.log_compilations, settings.log_fallbacks)
        self._dtypes = DtypeChoice()
        self._pinned = PinnedMemory()

    @property
    def loading_device(self) -> torch.device:
        return torch.device("cpu") if self.settings.weights_on_host else self.torch_device

    @property
    def compiles_parts(self) -> bool:
        return True

    @property
    def regional_compilation(self) -> bool:
        return self.settings.regional_compilation

    @property
    def reserves_graphs(self) -> bool:
        # The bridge keeps recipes and their workspaces in HBM, captured or not.
        return self.mode.captures

    def adapt(self, config: Mapping[str, Any]) -> None:
        needed = needs_float32_scores(str(config.get("model_type", "")))
        self.settings, self.kernels = for_model(self.settings, self.kernels, float32_scores=needed)

    def choose_dtype(self, requested: str, checkpoint: torch.dtype | None) -> torch.dtype:
        return self._dtypes.choose(requested, checkpoint)

    def memory(self) -> MemoryFigures:
        return hbm_figures(self._bridge.hpu)

    def measure(self, work: Callable[[], object]) -> MemoryUse:
        return measure_hbm(self._bridge.hpu, self.flush, work)

    def out_of_memory(self, error: BaseException) -> bool:
        return super().out_of_memory(error) or says_full(error)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._buffers.add(super().zeros(shape, dtype))

    def compile(self, function: Function) -> Function:
        return self._execution.compile(function)

    def expect_shapes(self, count: int) -> None:
        self._execution.expect_shapes(count)

    def capture(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Forward:
        return self._execution.capture(forward, tensors)

    def run_eagerly(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Any:
        return self._execution.run_eagerly(forward, tensors)

    def warming(self, modules: Iterable[nn.Module] = ()) -> AbstractContextManager[None]:
        return self._execution.warming(modules)

    def flush(self) -> None:
        self._execution.flush()

    def layer_done(self, index: int) -> None:
        self._execution.layer_done(index)

    def step(self, number: int) -> AbstractContextManager[None]:
        return self._steps.step(number)

    def compilations(self) -> int:
        return self._bridge.total(COMPILATIONS)

    def counters(self) -> dict[str, int]:
        common = {
            "graph_compilations": self._bridge.total(COMPILATIONS),
            "cpu_fallbacks": self._bridge.total(FALLBACKS),
        }
        return self._execution.counters() | common

    def profile(self) -> AbstractContextManager[list[Event]]:
        # docs/gaudi-facts.md 4.8: the bridge gives torch's profiler the card's activities under this name.
        return torch_activities(self, (ProfilerActivity.CPU, ProfilerActivity.HPU))

    def synchronize(self) -> None:
        self.flush()
        self._bridge.hpu.synchronize()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        # Collected operations are flushed first: a recipe would else hold them together with the views that a
        # step takes of this tensor, and there would be one for each kind of step. The bridge keeps the host's
        # tensor until it is read; its memory is filled again only when the step that it is for is finished.
        self.flush()
        return tensor.to(self.torch_device, non_blocking=True)

    def begin_to_host(self, tensor: torch.Tensor) -> HostCopy:
        self.host_copies += 1
        tensor = tensor.contiguous()
        self.flush()
        count = tensor.numel() * tensor.itemsize
        memory = self._pinned.take(count)
        if memory is None:
            return FinishedCopy(tensor.cpu())
        host = memory[:count].view(tensor.dtype).view(tensor.shape)
        host.copy_(tensor, non_blocking=True)
        event = self._bridge.hpu.Event()
        event.record()
        return EventCopy(host, event, self._pinned, memory)

    def attend_prefill(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        features: AttentionFeatures = NO_FEATURES,
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        attention = self.settings.attention
        return attend_prefill(self.kernels, attention, query, key, value, mask, scale, features, lengths)

    def attend_decode(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        blocks: torch.Tensor,
        rows: torch.Tensor,
        bias: torch.Tensor,
        scale: float,
        features: AttentionFeatures = NO_FEATURES,
    ) -> torch.Tensor:
        softmax = self.settings.attention.softmax
        return attend_decode(
            self.kernels, softmax, query, key_cache, value_cache, blocks, rows, bias, scale, features
        )

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool = False
    ) -> torch.Tensor:
        return kernels.rms_norm(self.kernels, x, weight, eps, unit_offset=unit_offset)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return kernels.rotate(self.kernels, x, cos, sin)

    def experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        activation: str,
    ) -> torch.Tensor:
        return kernels.experts(self.kernels, x, weights, ids, gate_up, down, activation)
