"""The dynamo backend `hpu_backend` (gaudi-facts.md 4.1)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.exc import InvalidBackend

from services.engine.device.sim.card import Card, card

NAME = "hpu_backend"
# Each static graph is one recipe here anyway, as with this option; the simulator has no dynamic recipes.
_OPTIONS = frozenset({"force_static_compile"})


class CompiledRegion:
    """A graph of dynamo as one recipe for each set of shapes that it runs with."""

    def __init__(self, device: Card, module: torch.fx.GraphModule) -> None:
        self._card = device
        self._module = module
        self._code = hashlib.sha256(module.code.encode()).hexdigest()
        self._compiled: set[tuple[Any, ...]] = set()

    def __call__(self, *args: Any) -> Any:
        recipe = ("compiled", self._code, *map(_shape, args))
        if recipe not in self._compiled:
            self._compiled.add(recipe)
            self._card.counters.backend_compilations += 1
            self._card.compile(recipe, operations=len(self._module.graph.nodes))
        with self._card.region():
            return self._module(*args)


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.stride()
    return type(value), repr(value)


def hpu_backend(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> CompiledRegion:
    """Compile a graph that dynamo traced. The bridge does not have this backend in lazy mode.

    Nothing is compiled before the graph's first run. Beyond dynamo's limit of recompilations (8 unless
    raised) dynamo no longer calls a backend, without a word: then the operations run one by one, and each of
    their shapes counts as a compilation of its own. Raises InvalidBackend, and ValueError for unknown
    options.
    """
    there = card()
    if there.lazy:
        raise InvalidBackend(name=NAME)
    if unknown := set(options or {}) - _OPTIONS:
        raise ValueError(f"{NAME} in the simulator knows {sorted(_OPTIONS)}, not {sorted(unknown)}")
    if kwargs:
        raise ValueError(f"{NAME} takes options, not {sorted(kwargs)}")
    return CompiledRegion(there, graph_module)
