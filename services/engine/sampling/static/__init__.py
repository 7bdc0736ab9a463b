"""Sampling in few static shapes, for devices on which each new one costs a compilation."""

from __future__ import annotations

from services.engine.sampling.static.buffers import StaticBuffers, StaticSizes, allocate
from services.engine.sampling.static.program import Call, SamplingCalls, StaticProgram
from services.engine.sampling.static.stages import Stages

__all__ = [
    "Call",
    "SamplingCalls",
    "Stages",
    "StaticBuffers",
    "StaticProgram",
    "StaticSizes",
    "allocate",
]
