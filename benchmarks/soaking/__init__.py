"""A soak: the clients that a server endures, what is measured meanwhile, and the verdict."""

from __future__ import annotations

from benchmarks.soaking.clients import Client, Counts, Neighbour, cancelling, hostile, normal, slow
from benchmarks.soaking.judging import GROWTH, Books, Meter, Process, Sample, faults, growth

__all__ = [
    "GROWTH",
    "Books",
    "Client",
    "Counts",
    "Meter",
    "Neighbour",
    "Process",
    "Sample",
    "cancelling",
    "faults",
    "growth",
    "hostile",
    "normal",
    "slow",
]
