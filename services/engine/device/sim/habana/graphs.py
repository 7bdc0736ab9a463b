"""`habana_frameworks.torch.hpu.graphs` (gaudi-facts.md 4.2). It has contents in lazy mode alone."""

from __future__ import annotations

from typing import Any, Final

import services.engine.device.sim.graphs as captures
from services.engine.device.sim.card import card

NAMES: Final = (
    "HPUGraph",
    "extract_tensors",
    "graph",
    "input_hash",
    "make_graphed_callables",
    "wrap_in_hpu_graph",
    "wrap_in_hpu_graph_func",
)


def __getattr__(name: str) -> Any:
    if name in NAMES and card().lazy:
        return getattr(captures, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}: are you in lazy mode?")
