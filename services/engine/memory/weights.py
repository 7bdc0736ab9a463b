"""How many bytes of weights each card holds, from a model's shape. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from services.engine.memory.shape import ModelShape

# INT4 keeps a 16 bit scale and a 4 bit zero point for each group of so many weights.
_GROUP: Final = 128
_GROUP_BITS: Final = 16 + 4


class WeightScheme(Enum):
    """How the weights of linear layers are kept. Embedding, head, router and norms stay in 16 or 32 bits."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"

    def linear_bytes(self, parameters: int) -> int:
        """Bytes of linear layers with so many weights, scales included."""
        match self:
            case WeightScheme.FLOAT32:
                return 4 * parameters
            case WeightScheme.FP8 | WeightScheme.INT8:
                return parameters
            case WeightScheme.INT4:
                return -(-parameters * (4 * _GROUP + _GROUP_BITS) // (8 * _GROUP))
            case _:
                return 2 * parameters

    @property
    def other_size(self) -> int:
        """Bytes of an element of everything else."""
        return 4 if self is WeightScheme.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class WeightCount:
    """Parameters on one card. `embedding`: with the head; `small`: norms, biases and routers."""

    attention: int
    mlp: int
    experts: int
    embedding: int
    small: int

    @property
    def total(self) -> int:
        """All parameters of the card."""
        return self.attention + self.mlp + self.experts + self.embedding + self.small

    def bytes(self, scheme: WeightScheme) -> int:
        """Bytes of the card's weights."""
        linear = scheme.linear_bytes(self.attention + self.mlp + self.experts)
        return linear + scheme.other_size * (self.embedding + self.small)


def stored_scheme(shape: ModelShape) -> WeightScheme:
    """How the checkpoint keeps linear layers: of packed ones, the next that has as many bits.

    Of packed ones that do not say their bits, bfloat16, which is never too little.
    """
    packed = shape.quantization
    if packed is None:
        return WeightScheme.FLOAT32 if shape.float32 else WeightScheme.BFLOAT16
    if packed.bits is None or packed.bits > 8:
        return WeightScheme.BFLOAT16
    if packed.bits <= 4:
        return WeightScheme.INT4
    return WeightScheme.FP8 if packed.floating else WeightScheme.INT8


def heads_per_card(shape: ModelShape, cards: int) -> tuple[int, int]:
    """Query heads and KV heads of each card; where there are fewer KV heads than cards, some are kept twice.

    Raises ValueError, one line, for a tensor-parallel size that does not divide the heads.
    """
    if shape.heads % cards:
        fitting = ", ".join(str(size) for size in range(1, shape.heads + 1) if shape.heads % size == 0)
        raise ValueError(
            f"tensor-parallel-size {cards} does not divide the {shape.heads} heads of {shape.name}: "
            f"choose one of {fitting}"
        )
    if shape.kv_heads % cards and cards % shape.kv_heads:
        raise ValueError(
            f"tensor-parallel-size {cards} and the {shape.kv_heads} KV heads of {shape.name} do not divide "
            "each other: choose a power of two"
        )
    return shape.heads // cards, max(1, shape.kv_heads // cards)


def count_weights(shape: ModelShape, cards: int = 1) -> WeightCount:
    """Parameters on each of so many cards. Raises ValueError as `heads_per_card` does."""
    heads, kv_heads = heads_per_card(shape, cards)
    hidden, layers, sparse = shape.hidden, shape.layers, shape.layers - shape.dense_layers
    matrices = 3 if shape.gated else 2
    attention, attention_small = _attention(shape, heads, kv_heads)
    mlp = shape.dense_layers * matrices * hidden * -(-shape.inner // cards)
    mlp += sparse * 3 * hidden * -(-shape.shared_inner // cards)
    experts = sparse * shape.experts * 3 * hidden * -(-shape.expert_inner // cards)
    # Each expert has a row of the router, and a bias where the choice is corrected.
    router = shape.experts * (hidden + shape.router_bias) + (hidden if shape.shared_gate else 0)
    small = layers * (attention_small + shape.norms_each * hidden) + hidden + sparse * router
    embedding = -(-shape.vocab // cards) * hidden * (1 if shape.tied else 2)
    return WeightCount(layers * attention, mlp, experts, embedding, small)


def active_parameters(shape: ModelShape) -> int:
    """Parameters that one token passes: of experts the chosen ones, and of embedding and head the head."""
    count = count_weights(shape)
    chosen = count.experts * shape.experts_chosen // shape.experts if shape.experts else 0
    return count.attention + count.mlp + chosen + count.small + shape.vocab * shape.hidden


def _attention(shape: ModelShape, heads: int, kv_heads: int) -> tuple[int, int]:
    """Matrices and small parameters of one layer's attention."""
    hidden, dim = shape.hidden, shape.head_dim
    if shape.latent is not None:
        latent = shape.latent
        query_dim = latent.plain_dim + latent.rotary_dim
        first = hidden * (latent.kv_rank + latent.rotary_dim)
        query = (latent.query_rank or hidden) * heads * query_dim + (latent.query_rank or 0) * hidden
        second = latent.kv_rank * heads * (latent.plain_dim + latent.value_dim)
        return first + query + second + heads * latent.value_dim * hidden, latent.kv_rank + (
            latent.query_rank or 0
        )
    matrices = hidden * (heads + 2 * kv_heads) * dim + heads * dim * hidden
    small = (heads + 2 * kv_heads) * dim if shape.query_bias else 0
    small += hidden if shape.output_bias else 0
    return matrices, small + (2 * dim if shape.head_norms else 0)
