"""From logits to tokens; static_*: in few static shapes, where each new one costs a compilation."""

from __future__ import annotations

from services.engine.sampling.inputs import MaskBuffer, SamplerInputs, TokenMasks, prepare, with_masks
from services.engine.sampling.rows import (
    RowParams,
    RowStatus,
    SampledToken,
    SequenceState,
    SequenceStates,
    read_best,
    unpack,
)
from services.engine.sampling.sampler import prompt_logprobs, sample, unpack_prompt
from services.engine.sampling.static_program import Call, SamplingCalls, StaticProgram
from services.engine.sampling.static_stages import Stages, StaticBuffers, StaticSizes, allocate

__all__ = [
    "Call",
    "MaskBuffer",
    "RowParams",
    "RowStatus",
    "SampledToken",
    "SamplerInputs",
    "SamplingCalls",
    "SequenceState",
    "SequenceStates",
    "Stages",
    "StaticBuffers",
    "StaticProgram",
    "StaticSizes",
    "TokenMasks",
    "allocate",
    "prepare",
    "prompt_logprobs",
    "read_best",
    "sample",
    "unpack",
    "unpack_prompt",
    "with_masks",
]
