"""From logits to tokens."""

from __future__ import annotations

from services.engine.sampling.rows import RowParams, SampledToken, unpack
from services.engine.sampling.sampler import SampledBatch, sample, sample_batch

__all__ = ["RowParams", "SampledBatch", "SampledToken", "sample", "sample_batch", "unpack"]
