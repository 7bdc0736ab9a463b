"""Constraints of an answer: from the parameters of a request to what an engine gets."""

from __future__ import annotations

from gateway.constraints.structured import wanted_of
from gateway.constraints.tools import CallableFunction, own_calls, wanted_calls
from gateway.constraints.wanted import Wanted

__all__ = ["CallableFunction", "Wanted", "own_calls", "wanted_calls", "wanted_of"]
