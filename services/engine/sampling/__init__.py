"""From logits to tokens."""

from __future__ import annotations

from services.engine.sampling.inputs import SamplerInputs, prepare, with_masks
from services.engine.sampling.logprobs import prompt_logprobs, unpack_prompt
from services.engine.sampling.masks import MaskBuffer, TokenMasks
from services.engine.sampling.rows import RowParams, RowStatus, SampledToken, read_best, unpack
from services.engine.sampling.sampler import sample
from services.engine.sampling.state import SequenceState, SequenceStates

__all__ = [
    "MaskBuffer",
    "RowParams",
    "RowStatus",
    "SampledToken",
    "SamplerInputs",
    "SequenceState",
    "SequenceStates",
    "TokenMasks",
    "prepare",
    "prompt_logprobs",
    "read_best",
    "sample",
    "unpack",
    "unpack_prompt",
    "with_masks",
]
