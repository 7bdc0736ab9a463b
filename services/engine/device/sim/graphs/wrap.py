"""`wrap_in_hpu_graph`: captures a module's forward once per key, then replays it (gaudi-facts.md 4.2)."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from services.engine.device.sim.graphs.graph import HPUGraph
from services.engine.device.sim.graphs.key import copy_to, extract_tensors, input_hash, tensors_of

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
    """Replaces `module.forward` by one that captures and replays; returns the module itself.

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
