"""The HPU: Intel Gaudi 2 and 3 through Habana's PyTorch bridge."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity

from catenary.gaudi import needs_float32_scores
from catenary.telemetry import get_logger
from services.engine.device.attention import NO_FEATURES, AttentionFeatures
from services.engine.device.base import (
    DTYPES,
    Device,
    DeviceError,
    ExecutionMode,
    FinishedCopy,
    Forward,
    Function,
    HostCopy,
)
from services.engine.device.hpu.attention import attend_decode, attend_prefill
from services.engine.device.hpu.bridge import Bridge, HpuModule, Metric, MetricsModule
from services.engine.device.hpu.copies import EventCopy, PinnedMemory
from services.engine.device.hpu.execution import PersistentBuffers, execution_for
from services.engine.device.hpu.kernels import Kernels, experts, for_model, rms_norm, rotate
from services.engine.device.hpu.settings import HpuProperties, HpuSettings, StepLog
from services.engine.device.memory import MemoryFigures, MemoryUse
from services.engine.device.profiling import Event, torch_activities

# Messages of the bridge when a tensor or a workspace of a recipe finds no room: "MODULE:PT_DEVMEM Allocation
# failed for size::234881024 (224)MB", "MODULE:SYNHELPER workspace Allocation of size ::14493510400 failed!"
# (optimum-habana issue 1469, Model-References issue 10).
_FULL = ("allocation failed for size", "workspace allocation of size", "out of memory")


def hbm_figures(hpu: HpuModule) -> MemoryFigures:
    """Total and free HBM: the process holds the whole card, so all that is free is its own."""
    free, total = hpu.mem_get_info()
    return MemoryFigures(total=total, free=free)


def measure_hbm(hpu: HpuModule, flush: Callable[[], None], work: Callable[[], object]) -> MemoryUse:
    """Runs `work` to its end on the device. Returns the bytes that it kept, and its peak."""
    flush()
    hpu.synchronize()
    hpu.reset_peak_memory_stats()
    before = hpu.memory_allocated()
    work()
    flush()
    hpu.synchronize()
    kept, peak = hpu.memory_allocated() - before, hpu.max_memory_allocated() - before
    return MemoryUse(kept=max(0, kept), peak=max(0, peak))


def says_full(error: BaseException) -> bool:
    """Whether an error of the bridge means that HBM is full."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in _FULL)


log = get_logger(__name__)

COMPILATIONS = "graph_compilation"
FALLBACKS = "cpu_fallback"


class StepMetrics:
    """Logs what each step compiled and what of it ran on the CPU, as far as the settings ask for it."""

    def __init__(self, metrics: MetricsModule, compilations: StepLog, fallbacks: StepLog) -> None:
        self._metrics = metrics
        self._wanted = {COMPILATIONS: compilations, FALLBACKS: fallbacks}

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the device's part of a step."""
        wanted = [name for name, which in self._wanted.items() if which is not StepLog.OFF]
        with ExitStack() as stack:
            metrics = {name: stack.enter_context(self._metrics.metric_localcontext(name)) for name in wanted}
            yield
        for name, metric in metrics.items():
            self._report(name, metric, number)

    def _report(self, name: str, metric: Metric, number: int) -> None:
        values = dict(metric.stats())
        count = values["TotalNumber"]
        if not count and self._wanted[name] is not StepLog.ALL:
            return
        if name == COMPILATIONS:
            log.info("graph compilations of a step", step=number, count=count, time=values["TotalTime"])
        else:
            log.info("CPU fallbacks of a step", step=number, count=count, ops=values["FallbackOps"])


class DtypeChoice:
    """Chooses, and logs once for each change."""

    def __init__(self) -> None:
        self._said = False

    def choose(self, requested: str, checkpoint: torch.dtype | None) -> torch.dtype:
        """bfloat16 but for an explicit float32. Raises DeviceError for an unknown dtype."""
        if requested != "auto" and requested not in DTYPES:
            raise DeviceError(f"dtype {requested!r} is unknown; choose auto, {', '.join(DTYPES)}")
        if requested == "float32":
            self._say("float32 was asked for: an HPU is several times as fast in bfloat16")
            return torch.float32
        if requested == "float16":
            self._say("an HPU computes in bfloat16 what was asked for in float16")
        elif requested == "auto" and checkpoint not in (None, torch.bfloat16):
            name = str(checkpoint).removeprefix("torch.")
            self._say(f"a checkpoint in {name} runs in bfloat16 on an HPU: dtype float32 keeps its precision")
        return torch.bfloat16

    def _say(self, text: str) -> None:
        if not self._said:
            self._said = True
            log.warning(text)


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
        return rms_norm(self.kernels, x, weight, eps, unit_offset=unit_offset)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rotate(self.kernels, x, cos, sin)

    def experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        activation: str,
    ) -> torch.Tensor:
        return experts(self.kernels, x, weights, ids, gate_up, down, activation)
