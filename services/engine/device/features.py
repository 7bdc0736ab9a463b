"""What some architectures do to attention scores, beside scaling and masking them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionFeatures:
    """Extras of one layer's attention.

    softcap: scores become `softcap * tanh(scores / softcap)` before any mask or bias (Gemma 2).
    sinks [heads]: one more logit for each head, which takes part in the softmax and adds no value (gpt-oss).
    alibi [heads]: slopes; a score falls by the slope for each position between query and key. The caller of
    a device has put it into the mask or bias.
    """

    softcap: float | None = None
    sinks: torch.Tensor | None = None
    alibi: torch.Tensor | None = None


NO_FEATURES = AttentionFeatures()
