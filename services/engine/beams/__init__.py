"""Beam search: which continuations go on, which are finished, and when the search ends. Pure."""

from __future__ import annotations

from services.engine.beams.search import BeamSearch, Continuation, Hypothesis
from services.engine.beams.trail import Candidate, ScoredToken

__all__ = ["BeamSearch", "Candidate", "Continuation", "Hypothesis", "ScoredToken"]
