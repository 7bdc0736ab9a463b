"""From logits to tokens."""

from __future__ import annotations

from services.engine.sampling.rows import MAX_TOP_LOGPROBS, RowParams, SampledToken
from services.engine.sampling.sampler import sample

__all__ = ["MAX_TOP_LOGPROBS", "RowParams", "SampledToken", "sample"]
