"""`wrap_in_hpu_graph` and `make_graphed_callables`: captures of a module by key, then replays."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.engine.device.sim.graphs.graph import GraphError, HPUGraph


def input_hash(value: Any, autocast: bool = False) -> int:
    """The key of a call's (args, kwargs): tensors by shape and view, everything else by value.

    Neither a tensor's dtype nor its device is in it. A number that changes from call to call therefore gives
    a new key, and with it a new graph, each time. It is a plain hash: collisions go unnoticed.
    """
    if isinstance(value, dict):
        return input_hash(tuple(value.items()), autocast)
    if isinstance(value, list) or (isinstance(value, tuple) and not isinstance(value, torch.Size)):
        return hash((tuple(input_hash(item, autocast) for item in value), autocast))
    if isinstance(value, torch.Tensor):
        return hash((value.shape, view_hash(value), autocast))
    if isinstance(value, collections.UserDict):
        return hash(tuple((key, tuple(item)) for key, item in value.items()))
    return hash((value, autocast))


def view_hash(tensor: torch.Tensor) -> int:
    """0 for a tensor that is nobody's view, else of where its elements lie in the viewed one."""
    if tensor.is_contiguous() and tensor.storage_offset() == 0:
        return 0
    return hash((tensor.stride(), tensor.storage_offset()))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts, in their order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_of(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


def extract_tensors(value: Any) -> list[torch.Tensor]:
    """The same, and those that an object has as attributes."""
    if isinstance(value, (torch.Tensor, dict, list, tuple)):
        return tensors_of(value)
    return [tensor for item in getattr(value, "__dict__", {}).values() for tensor in extract_tensors(item)]


def copy_to(target: Any, source: Any) -> None:
    """Copy a call's tensors into those that were captured; everything else stays as captured.

    The types must agree, level by level, as they do under equal keys. Raises RuntimeError.
    """
    if type(target) is not type(source):
        raise RuntimeError(
            f"a graph captured {type(target).__name__} where it now gets {type(source).__name__}"
        )
    if isinstance(target, dict):
        for key in target:
            copy_to(target[key], source[key])
    elif isinstance(target, (list, tuple)) and not isinstance(target, torch.Size):
        for into, from_ in zip(target, source, strict=True):
            copy_to(into, from_)
    elif isinstance(target, torch.Tensor) and target is not source:
        target.copy_(source, non_blocking=True)


Function = Callable[..., Any]
_TENSOR_CACHE_OFF = "PT_HPUGRAPH_DISABLE_TENSOR_CACHE"


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph with what its capture was called with and returned. `inputs` is what a replay copies into."""

    graph: HPUGraph
    inputs: Any
    outputs: Any
    tensor_cache: bool


@dataclass(frozen=True, slots=True)
class _Options:
    asynchronous: bool
    disable_tensor_cache: bool
    dry_run: bool
    max_graphs: int | None

    @property
    def tensor_cache(self) -> bool:
        """The variable overrides the argument, in both directions."""
        variable = os.environ.get(_TENSOR_CACHE_OFF)
        return not self.disable_tensor_cache if variable is None else variable != "1"


class _Wrapped:
    """The graphs of one function, by key. They live until `clear`."""

    def __init__(self, function: Function, options: _Options) -> None:
        self._function = function
        self._options = options
        self._cache: dict[int, Captured] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        warmup = kwargs.pop("warmup_mode", False)
        if kwargs.pop("bypass_hpu_graphs", False):
            return self._function(*args, **kwargs)
        key = input_hash((args, kwargs), torch.is_autocast_enabled("hpu"))
        kept = extract_tensors(kwargs.pop("cache_tensors_list", []))
        captured = self._cache.get(key)
        if captured is None:
            if self._options.max_graphs is not None and len(self._cache) == self._options.max_graphs:
                return self._function(*args, **kwargs)
            captured = self._cache[key] = self._capture(args, kwargs, kept)
        elif not warmup:
            self._replay(captured, args, kwargs)
        return captured.outputs

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], kept: list[Any]) -> Captured:
        tensor_cache = self._options.tensor_cache
        dry_run = self._options.dry_run or not tensor_cache
        captured = HPUGraph()
        given = tensors_of((args, kwargs))
        with captured.capturing(dry_run):
            if not tensor_cache:
                captured.mark_user_inputs(given)
            outputs = self._function(*args, **kwargs)
        # The bridge replays a dry run here, to launch it: the simulator's capture has computed.
        if tensor_cache:
            return Captured(captured, (args, kwargs), outputs, tensor_cache)
        captured.mark_user_outputs([*kept, *tensors_of(outputs)])
        return Captured(captured, _unmatched(captured, given), outputs, tensor_cache)

    def _replay(self, captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if captured.tensor_cache:
            copy_to(captured.inputs, (args, kwargs))
            captured.graph.replay(self._options.asynchronous)
            return
        given = tensors_of((args, kwargs))
        copy_to(captured.inputs, _unmatched(captured.graph, given))
        captured.graph.replayV3(given, self._options.asynchronous)

    def clear(self) -> None:
        self._cache.clear()

    def clear_inputs(self) -> None:
        for captured in self._cache.values():
            captured.graph.clear_inputs()


def _unmatched(captured: HPUGraph, given: list[Any]) -> tuple[Any, ...]:
    matched = captured.get_user_input_match_indices()
    return tuple(tensor for index, tensor in enumerate(given) if index not in matched)


def wrap_in_hpu_graph(
    module: torch.nn.Module,
    asynchronous: bool = False,
    disable_tensor_cache: bool = False,
    dry_run: bool = False,
    max_graphs: int | None = None,
) -> torch.nn.Module:
    """Replace `module.forward` by one that captures and replays; return the module itself.

    The first call of a key captures and computes. Later ones copy their tensors into those of the first call
    and replay, or with `disable_tensor_cache` replay on the new tensors. What they return are the tensors of
    the first call: the next replay overwrites them. Beyond `max_graphs` keys the module runs as it was.
    `asynchronous` only says whether the host waits for a replay, which cannot be seen here. Adds
    `clear_cache()` and `clear_inputs()`.
    """
    original = module.forward
    options = _Options(asynchronous, disable_tensor_cache, dry_run, max_graphs)
    wrapped = _Wrapped(original, options)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    module.forward = forward
    module.clear_cache = wrapped.clear  # type: ignore[assignment]
    module.clear_inputs = wrapped.clear_inputs  # type: ignore[assignment]
    return module


def wrap_in_hpu_graph_func(
    func: Function,
    asynchronous: bool = False,
    disable_tensor_cache: bool = False,
    dry_run: bool = False,
    max_graphs: int | None = None,
) -> Function:
    """Like `wrap_in_hpu_graph`, for a function; it has no way to clear its graphs."""
    wrapped = _Wrapped(func, _Options(asynchronous, disable_tensor_cache, dry_run, max_graphs))

    def forward(*args: Any, **kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    return forward


def make_graphed_callables(
    callables: Function | tuple[Function, ...],
    sample_args: Any,
    warmups: int = 0,
    allow_unused_input: bool = False,
    asynchronous: bool = False,
    disable_tensor_cache: bool = False,
    dry_run: bool = False,
) -> Any:
    """Capture each function at once, with its own tuple of sample tensors, and return what replays it.

    A single function may be given instead of tuples. The results are the captured tensors, which the next
    call overwrites. A module's `forward` is replaced. Gradients are not captured here, so `warmups` and
    `allow_unused_input` must stay as they are. Raises GraphError.
    """
    if warmups or allow_unused_input:
        raise GraphError("the simulator's graphed callables have no gradients, which these arguments are for")
    single = not isinstance(callables, tuple)
    functions = (callables,) if not isinstance(callables, tuple) else callables
    samples = (sample_args,) if single else sample_args
    made = [
        _graphed(function, args, asynchronous, disable_tensor_cache, dry_run)
        for function, args in zip(functions, samples, strict=True)
    ]
    return made[0] if single else tuple(made)


def _graphed(
    function: Function, args: Sequence[Any], asynchronous: bool, without_cache: bool, dry_run: bool
) -> Function:
    if not all(isinstance(arg, torch.Tensor) for arg in args):
        raise GraphError("sample_args for each callable must be a tuple of Tensors")
    captured = HPUGraph()
    with captured.capturing(dry_run or without_cache):
        if without_cache:
            captured.mark_user_inputs(args)
        outputs = function(*args)
    matched = captured.get_user_input_match_indices()

    def replay(*given: torch.Tensor) -> Any:
        for index, (own, new) in enumerate(zip(args, given, strict=True)):
            if index not in matched:
                own.copy_(new)
        if without_cache:
            captured.replayV3(given, asynchronous)
        else:
            captured.replay(asynchronous)
        return outputs

    if isinstance(function, torch.nn.Module):
        function.forward = replay
        return function
    return replay
