"""Specification of our decoder for one checkpoint: all that differs between families, as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.engine.model.checks import ModelError


class UnsupportedByDecoder(ModelError):
    """The config asks for something that the decoder does not compute."""

    def __init__(self, model_type: str, what: str) -> None:
        self.what = what
        super().__init__(
            f"our decoder does not know {what} (model type {model_type}): "
            "set model-backend to transformers, or to auto"
        )


def _alone(partial: torch.Tensor) -> torch.Tensor:
    return partial


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `world`. reduce: the sum of a tensor over all ranks; with one rank the tensor itself."""

    rank: int = 0
    world: int = 1
    reduce: Callable[[torch.Tensor], torch.Tensor] = _alone

    def split(self, size: int, what: str) -> tuple[int, int]:
        """This rank's (start, length) of a dimension that the ranks share. Raises ModelError if uneven."""
        if size % self.world:
            raise ModelError(f"{what} ({size}) cannot be split over {self.world} ranks")
        length = size // self.world
        return self.rank * length, length


ALONE = Shard()


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One rotary embedding: inverse frequencies, one for two dimensions, and the factor on cos and sin."""

    frequencies: tuple[float, ...]
    factor: float


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """A mixture of experts instead of one MLP.

    normalize: whether the chosen experts' weights are made to sum to one. rounded: whether they are then
    rounded to the model's type (they stay float32 otherwise).
    """

    count: int
    per_token: int
    intermediate_size: int
    normalize: bool
    rounded: bool


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Differences between layers: the window (None: all), its rotary base, experts or one MLP."""

    window: int | None
    rope: int
    experts: bool


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The architecture of a checkpoint.

    unit_offset_norm: norms scale by one plus their weight, in float32 (gemma). sandwich_norms: the outputs of
    attention and MLP are normed before they are added. embedding_rounded: the multiplier is rounded to the
    model's type first (gemma). A residual multiplier scales what is added, the divisor what the head gives.
    scores: whether tokens are ever scored; else the model has no head, whatever the checkpoint holds.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    scale: float
    layers: tuple[LayerPlan, ...]
    ropes: tuple[RopeSpec, ...]
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    unit_offset_norm: bool = False
    sandwich_norms: bool = False
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_multiplier: float = 1.0
    embedding_rounded: bool = False
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    experts: ExpertSpec | None = None
    scores: bool = True
