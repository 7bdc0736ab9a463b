"""HPU graphs: captured device work, and what wraps it (gaudi-facts.md 4.2)."""

from __future__ import annotations

from services.engine.device.sim.graphs.graph import GraphError, HPUGraph, graph
from services.engine.device.sim.graphs.wrap import (
    extract_tensors,
    input_hash,
    make_graphed_callables,
    wrap_in_hpu_graph,
    wrap_in_hpu_graph_func,
)

__all__ = [
    "GraphError",
    "HPUGraph",
    "extract_tensors",
    "graph",
    "input_hash",
    "make_graphed_callables",
    "wrap_in_hpu_graph",
    "wrap_in_hpu_graph_func",
]
