"""The servers that Catenary is compared with: where they lie, how they are started, what is measured."""

from __future__ import annotations

from benchmarks.peers.environments import DEFAULT_DIRECTORY, PeerError, command_to_make
from benchmarks.peers.measuring import FIRST_TOKEN, Lengths, Measuring, Sample, machine, same_kind
from benchmarks.peers.report import Cell, best, cell, check_plot, figures, ratio, ratios, save_plot, table
from benchmarks.peers.server import Opened, open_servers
from benchmarks.peers.subjects import OWN, SUBJECTS, Model

__all__ = [
    "DEFAULT_DIRECTORY",
    "FIRST_TOKEN",
    "OWN",
    "SUBJECTS",
    "Cell",
    "Lengths",
    "Measuring",
    "Model",
    "Opened",
    "PeerError",
    "Sample",
    "best",
    "cell",
    "check_plot",
    "command_to_make",
    "figures",
    "machine",
    "open_servers",
    "ratio",
    "ratios",
    "same_kind",
    "save_plot",
    "table",
]
