"""From logits to tokens."""

from __future__ import annotations

from services.engine.sampling.rows import RowParams, SampledToken
from services.engine.sampling.sampler import sample

__all__ = ["RowParams", "SampledToken", "sample"]
