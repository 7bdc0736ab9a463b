"""The four ways in which an HPU executes forwards: eager, lazy, HPU graphs, compiled."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from catenary.telemetry import get_logger
from services.engine.device.base import DeviceError, ExecutionMode, Forward, Function
from services.engine.device.hpu.bridge import Bridge
from services.engine.device.hpu.settings import HpuSettings


class PersistentBuffers:
    """Knows them by weak references: the pool of a profile run goes when that is over."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[torch.Tensor]] = []

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Takes note of a tensor and returns it."""
        self._known.append(weakref.ref(tensor))
        return tensor

    def alive(self) -> list[torch.Tensor]:
        """Those that are still in use."""
        self._known = [known for known in self._known if known() is not None]
        return [tensor for known in self._known if (tensor := known()) is not None]

    def clear(self) -> None:
        """Zeroes them."""
        for tensor in self.alive():
            tensor.zero_()


class ModuleTensors:
    """The tensors that modules hold now: parameters, buffers and plain attributes, in containers too."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        # With the tensors themselves, so that no other gets the identity of one that goes.
        self._before = {id(tensor): (tensor, _version(tensor)) for _, tensor in self._held()}

    def changed(self, known: Sequence[torch.Tensor]) -> list[str]:
        """Names of tensors that were made or written since then, but for `known` ones and views of them."""
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
    """The tensors in nested containers. Other objects may know anything, such as the device."""
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
    """How often a tensor was written in place; tensors of inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version


class Execution:
    """EAGER: one kernel after the other. Each new combination of an operation and its shapes is compiled."""

    def __init__(self, bridge: Bridge, settings: HpuSettings, buffers: PersistentBuffers) -> None:
        self.bridge = bridge
        self.settings = settings
        self.buffers = buffers

    def compile(self, function: Function) -> Function:
        """Compiles a function of static shapes, where this is a compiler's mode."""
        return function

    def expect_shapes(self, count: int) -> None:
        """Told how many buckets are to come."""
        return

    def capture(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Forward:
        """See `Device.capture`."""
        return forward

    def run_eagerly(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Any:
        """Runs a forward without capturing or compiling it."""
        return forward(*tensors)

    def flush(self) -> None:
        """Ends what was collected."""
        return

    def layer_done(self, index: int) -> None:
        """Told after each decoder layer."""
        return

    def warming(self, modules: Iterable[nn.Module] = ()) -> AbstractContextManager[None]:
        """Around a warm-up before serving."""
        return nullcontext()

    def counters(self) -> dict[str, int]:
        """What this mode counts."""
        return {}


class LazyExecution(Execution):
    """LAZY: what lies between two flushes is one recipe, found again by the sequence of its operations.

    So a forward begins and ends with a flush: its recipes then owe nothing to what comes before and after,
    which differs from step to step.
    """

    def __init__(self, bridge: Bridge, settings: HpuSettings, buffers: PersistentBuffers) -> None:
        super().__init__(bridge, settings, buffers)
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
        return {"mark_steps": self._mark_steps}


log = get_logger(__name__)


class GraphExecution(LazyExecution):
    """GRAPH: lazy execution with graphs."""

    def __init__(self, bridge: Bridge, settings: HpuSettings, buffers: PersistentBuffers) -> None:
        super().__init__(bridge, settings, buffers)
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
        # What made the inputs is one recipe, and their copies into the graph are another.
        self.flush()


class Kept:
    """Tensors that a graph's capture is told of in one argument, whose place in a call's key is its identity.

    The bridge hashes a list of tensors in each call, which for some hundred takes up to a millisecond.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)

    def forget(self) -> None:
        """After the capture nothing is left to be looked for in replays."""
        self.tensors = ()


def takes_objects(graphs: Any) -> bool:
    """Whether this bridge finds tensors inside of an object, and does not make them part of a call's key."""
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
    so it gets tensors alone, always the same ones, which are the graph's own. A replay overwrites what the
    last one returned, and a forward's inputs too, which therefore must not be a buffer of somebody else.
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
        # The buffers that the forward reads and writes beside its arguments: without the tensor cache the
        # bridge keeps what it is told of and frees the rest.
        self._kept = kept
        # One graph for each module: a key that differs after all runs eagerly instead of holding memory.
        self._module = wrap(_Module(forward), disable_tensor_cache=True, max_graphs=1)

    def record(self) -> Any:
        """Records the forward, which runs once."""
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
