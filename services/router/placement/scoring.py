"""The numbers that several policies share: loads as columns, and draws among the lowest."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from services.router.placement.candidates import Candidates, Floats
from services.router.placement.options import PlacementOptions


def load(candidates: Candidates) -> Floats:
    """Share of an engine's running slots taken plus share of its KV taken; 0 is idle.

    Both count what others placed by the last report and what this router has placed by now. They are shares,
    not counts, so that unequal engines fill up alike.
    """
    board, of = candidates.board, candidates.of
    shares: Floats = of(board.sequences) / of(board.slots)
    shares += of(board.tokens) / of(board.kv_tokens)
    return shares


def lowest(scores: Floats, rng: random.Random) -> int:
    """Position of the lowest score, at random among equals, so that several routers do not herd."""
    best = np.flatnonzero(scores == scores.min())
    return int(best[0] if len(best) == 1 else best[rng.randrange(len(best))])


def overloaded(candidates: Candidates, options: PlacementOptions) -> npt.NDArray[np.bool_]:
    """Which of them have more sequences than the mean by the ratio and the number of the options.

    By the mean, not by the least: one engine that has just started does not make all others overloaded, and
    so does not attract all requests.
    """
    sequences = candidates.of(candidates.board.sequences)
    mean = float(sequences.sum()) / len(sequences)
    above: npt.NDArray[np.bool_] = sequences > max(mean * options.skew_ratio, mean + options.skew_sequences)
    return above
