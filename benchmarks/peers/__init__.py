"""The servers that Catenary is compared with: where they lie, how they are started, what is measured."""

from __future__ import annotations

from benchmarks.peers.environments import DEFAULT_DIRECTORY, PeerError, command_to_make
from benchmarks.peers.machine import machine, same_kind
from benchmarks.peers.measuring import FIRST_TOKEN, Lengths, Measuring, Sample
from benchmarks.peers.plots import check_plot, save_plot
from benchmarks.peers.report import Cell, best, cell, figures, ratio, ratios, table
from benchmarks.peers.session import Opened, open_servers
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
