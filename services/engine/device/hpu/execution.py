"""The four ways in which an HPU executes forwards: eager, lazy, HPU graphs, compiled."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from catenary.telemetry import get_logger
from services.engine.device.base import DeviceError, Execution, ExecutionMode, Forward, Function
from services.engine.device.hpu.bridge import Bridge, Metric, MetricsModule
from services.engine.device.hpu.settings import HpuSettings, StepLog

log = get_logger(__name__)


class PersistentBuffers:
    """Tensors that outlive a step, by weak references: the pool of a profile run goes when that is over."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[torch.Tensor]] = []

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Register a tensor and return it."""
        self._known.append(weakref.ref(tensor))
        return tensor

    def alive(self) -> list[torch.Tensor]:
        """Return the tensors that are still in use."""
        self._known = [known for known in self._known if known() is not None]
        return [tensor for known in self._known if (tensor := known()) is not None]

    def clear(self) -> None:
        """Zero all tensors in use."""
        for tensor in self.alive():
            tensor.zero_()


class ModuleTensors:
    """The tensors that modules hold now: parameters, buffers and plain attributes, in containers too."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        # With the tensors themselves, so that no other gets the identity of one that goes.
        self._before = {id(tensor): (tensor, _version(tensor)) for _, tensor in self._held()}

    def changed(self, known: Sequence[torch.Tensor]) -> list[str]:
        """Return names of tensors made or written since, except `known` ones and views of them."""
        expected = {id(tensor) for tensor in known}
        return sorted({name for name, tensor in self._held() if self._differs(tensor, expected)})

    def _differs(self, tensor: torch.Tensor, expected: set[int]) -> bool:
        if id(tensor) in expected or id(tensor._base) in expected:
            return False
        _, version = self._before.get(id(tensor), (None, None))
        return version is None or version != _version(tensor)

    def _held(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for root in self._modules:
            for name, module in root.named_modules():
                for attribute, value in vars(module).items():
                    # Parameters and buffers lie in these two dicts, whose names are left out of the path.
                    inner = "" if attribute in ("_parameters", "_buffers") else attribute
                    for path, tensor in _tensors(value, inner, seen):
                        yield ".".join(filter(None, (name, path))), tensor


def _tensors(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested containers. Other objects are not searched: they may hold the device."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple, set)):
        items = enumerate(value)
    else:
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for key, item in items:
        yield from _tensors(item, f"{path}.{key}" if path else str(key), seen)


def _version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written in place; tensors of inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version


COMPILATIONS = "graph_compilation"
FALLBACKS = "cpu_fallback"


class StepMetrics:
    """Logs of graph compilations and CPU fallbacks of each step, as far as the settings ask for them."""

    def __init__(self, metrics: MetricsModule, compilations: StepLog, fallbacks: StepLog) -> None:
        self._metrics = metrics
        self._wanted = {COMPILATIONS: compilations, FALLBACKS: fallbacks}

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Enclose the device's part of a step."""
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


class HpuExecution(Execution):
    """EAGER: one kernel after the other. Each new combination of an operation and its shapes is compiled."""

    def __init__(
        self, mode: ExecutionMode, bridge: Bridge, settings: HpuSettings, buffers: PersistentBuffers
    ) -> None:
        super().__init__(mode)
        self.bridge = bridge
        self.settings = settings
        self.buffers = buffers
        self._steps = StepMetrics(bridge.metrics, settings.log_compilations, settings.log_fallbacks)

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

    def step(self, number: int) -> AbstractContextManager[None]:
        return self._steps.step(number)

    def compilations(self) -> int:
        return self.bridge.total(COMPILATIONS)

    def counters(self) -> dict[str, int]:
        return {
            "graph_compilations": self.bridge.total(COMPILATIONS),
            "cpu_fallbacks": self.bridge.total(FALLBACKS),
        }


class LazyExecution(HpuExecution):
    """LAZY: the operations between two flushes are one recipe, found again by their sequence.

    A forward therefore begins and ends with a flush: its recipes do not depend on the operations before and
    after it, which differ from step to step.
    """

    def __init__(
        self, mode: ExecutionMode, bridge: Bridge, settings: HpuSettings, buffers: PersistentBuffers
    ) -> None:
        super().__init__(mode, bridge, settings, buffers)
        self._mark_steps = 0

    def run_eagerly(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Any:
        self.flush()
        result = forward(*tensors)
        self.flush()
        return result

    def flush(self) -> None:
        self._mark_steps += 1
        self.bridge.mark_step()

    def layer_done(self, index: int) -> None:
        # Bounds the size of a graph, and lets the device begin while the host collects the next layers.
        every = self.settings.layers_per_graph
        if every and (index + 1) % every == 0:
            self.flush()

    def counters(self) -> dict[str, int]:
        return super().counters() | {"mark_steps": self._mark_steps}


class GraphExecution(LazyExecution):
    """GRAPH: lazy execution with graphs."""

    def __init__(
        self, mode: ExecutionMode, bridge: Bridge, settings: HpuSettings, buffers: PersistentBuffers
    ) -> None:
        super().__init__(mode, bridge, settings, buffers)
        if bridge.wrap_in_hpu_graph is None:
            raise DeviceError("HPU graphs need PT_HPU_LAZY_MODE=1")
        self._wrap = bridge.wrap_in_hpu_graph
        self._objects = takes_objects(bridge.graphs)
        self._captures = 0
        self._replays = 0
        self._recording = False

    def capture(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Forward:
        self.flush()
        buffers = self.buffers.alive()
        kept = Kept(buffers) if self._objects else buffers
        graph = Graph(forward, tensors, kept, self._wrap, self._before_replay)
        self._recording = True
        try:
            graph.record()
        finally:
            self._recording = False
        self._captures += 1
        return graph

    def layer_done(self, index: int) -> None:
        # A graph is one piece: a flush inside of its capture would cut it.
        if not self._recording:
            super().layer_done(index)

    def counters(self) -> dict[str, int]:
        return super().counters() | {"captures": self._captures, "replays": self._replays}

    def _before_replay(self) -> None:
        self._replays += 1
        # The operations that made the inputs are one recipe, their copies into the graph are another.
        self.flush()


class Kept:
    """Tensors that a graph's capture gets in one argument, whose place in a call's key is its identity.

    The bridge hashes a list of tensors in each call, which for some hundred takes up to a millisecond.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)

    def forget(self) -> None:
        """Drop the tensors after the capture, so that replays do not search them."""
        self.tensors = ()


def takes_objects(graphs: Any) -> bool:
    """Return whether this bridge finds tensors in an object without making them part of a call's key."""
    find, key = getattr(graphs, "extract_tensors", None), getattr(graphs, "input_hash", None)
    if find is None or key is None:
        return False
    tensor = torch.zeros(1)
    kept = Kept((tensor,))
    try:
        found, before = find(kept), key(kept)
        kept.forget()
        return len(found) == 1 and found[0] is tensor and find(kept) == [] and key(kept) == before
    except Exception as error:
        log.debug("the bridge's graphs look at arguments in another way", reason=str(error))
        return False


class Graph:
    """One forward, recorded for one shape.

    A wrapped module's key is a hash of the shapes and views of tensors, and of the values of everything else:
    so it gets tensors alone, always the same ones, which are the graph's own. A replay overwrites the last
    one's results, and the forward's inputs too, which therefore must not be a buffer of the caller.
    """

    def __init__(
        self,
        forward: Forward,
        tensors: Sequence[torch.Tensor],
        kept: Kept | list[torch.Tensor],
        wrap: Callable[..., Any],
        before_replay: Callable[[], None],
    ) -> None:
        self._inputs = tuple(tensor.clone() for tensor in tensors)
        self._before_replay = before_replay
        # The buffers that the forward reads and writes in addition to its arguments: without the tensor cache
        # the bridge keeps these and frees the rest.
        self._kept = kept
        # One graph for each module: a key that differs after all runs eagerly instead of holding memory.
        self._module = wrap(_Module(forward), disable_tensor_cache=True, max_graphs=1)

    def record(self) -> Any:
        """Record the forward, which runs once."""
        result = self._module(*self._inputs, cache_tensors_list=self._kept)
        if isinstance(self._kept, Kept):
            self._kept.forget()
        return result

    def __call__(self, *tensors: torch.Tensor) -> Any:
        self._before_replay()
        for own, given in zip(self._inputs, tensors, strict=True):
            own.copy_(given)
        return self._module(*self._inputs, cache_tensors_list=self._kept)


class _Module(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.run = forward

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.run(*tensors)


_BACKEND = "hpu_backend"
# Entries of dynamo's cache for each bucket: one for each kind of region that shares code. Whole forwards are
# one. Beyond its limit, 8 by default, dynamo stops compiling without a word.
_ENTRIES_REGIONAL = 5
_ENTRIES_WHOLE = 3
_ACCUMULATED = 8
# Stages of sampling have shapes of their own, whose number does not follow from the buckets'.
_LEAST_ENTRIES = 64


class CompiledExecution(HpuExecution):
    """COMPILE: layers, norms and the head are compiled for each bucket; operations between them are eager."""

    def __init__(
        self, mode: ExecutionMode, bridge: Bridge, settings: HpuSettings, buffers: PersistentBuffers
    ) -> None:
        super().__init__(mode, bridge, settings, buffers)
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
        """Compile without running where the bridge can; forwards leave garbage in their outputs then."""
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
        return super().counters() | {"backend_compilations": _compiled_graphs() - self._before}


def _compiled_graphs() -> int:
    """Return the number of graphs that dynamo has given to the backend in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


_CLASSES: dict[ExecutionMode, type[HpuExecution]] = {
    ExecutionMode.EAGER: HpuExecution,
    ExecutionMode.LAZY: LazyExecution,
    ExecutionMode.GRAPH: GraphExecution,
    ExecutionMode.COMPILE: CompiledExecution,
}


def execution_for(
    mode: ExecutionMode, bridge: Bridge, settings: HpuSettings, buffers: PersistentBuffers
) -> HpuExecution:
    """Make the execution of a mode."""
    return _CLASSES[mode](mode, bridge, settings, buffers)
