"""Turns buckets into something replayable, and knows which of them are."""

from __future__ import annotations

from services.engine.graphs.graphs import Graphs
from services.engine.graphs.phase import Key, Phase, name_of, size_of

__all__ = ["Graphs", "Key", "Phase", "name_of", "size_of"]
