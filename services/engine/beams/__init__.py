"""Beam search: which continuations go on, which are finished, and when the search ends. Pure."""

from __future__ import annotations

from services.engine.beams.search import BeamSearch, Hypothesis
from services.engine.beams.trail import Candidate

__all__ = ["BeamSearch", "Candidate", "Hypothesis"]
