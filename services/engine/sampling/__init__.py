"""From logits to tokens: a program on the host, and its computations on the device."""

from __future__ import annotations

from services.engine.sampling.exact import ExactStages
from services.engine.sampling.inputs import MaskBuffer, TokenMasks
from services.engine.sampling.program import Call, Counts, Program, SamplingCalls
from services.engine.sampling.rows import (
    RowParams,
    RowStatus,
    SampledToken,
    SequenceState,
    SequenceStates,
    read_best,
    unpack,
    unpack_prompt,
)
from services.engine.sampling.static import StaticBuffers, StaticSizes, StaticStages, allocate

__all__ = [
    "Call",
    "Counts",
    "ExactStages",
    "MaskBuffer",
    "Program",
    "RowParams",
    "RowStatus",
    "SampledToken",
    "SamplingCalls",
    "SequenceState",
    "SequenceStates",
    "StaticBuffers",
    "StaticSizes",
    "StaticStages",
    "TokenMasks",
    "allocate",
    "read_best",
    "unpack",
    "unpack_prompt",
]
