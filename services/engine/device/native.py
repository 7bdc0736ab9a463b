"""A decoder that a device computes by itself: what it is told of the model, and what it then does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """A linear layer: weight [outputs, inputs], bias [outputs] or None. gated: gates, then as many ups."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    gated: bool = False


@dataclass(frozen=True, slots=True)
class NativeMlp:
    """down(activation(gate(x)) * up(x)); gate_up is gated."""

    gate_up: NativeLinear
    down: NativeLinear


@dataclass(frozen=True, slots=True)
class NativeExperts:
    """Experts instead of one MLP, of which each token has some.

    router [experts, hidden]; gate_up [experts, 2 * size, hidden], the gates first; down [experts, hidden,
    size]. per_token: how many experts a token has, those of the largest probabilities, which are its weights.
    normalize: weights are made to sum to one. rounded: they are then rounded to the model's type.
    """

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    per_token: int
    normalize: bool
    rounded: bool


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """One layer's weights; None where the architecture has no such norm.

    qkv: queries, keys, values one after another. rope: which of the spec's. window: how many positions it
    looks back, None: all.
    """

    qkv: NativeLinear
    output: NativeLinear
    mlp: NativeMlp | NativeExperts
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    attention_post_norm: torch.Tensor | None
    mlp_post_norm: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    rope: int
    window: int | None


@dataclass(frozen=True, slots=True)
class NativeRope:
    """Inverse frequencies, float32 [half of the rotated dimensions], and the factor on cos and sin."""

    frequencies: torch.Tensor
    factor: float


@dataclass(frozen=True, slots=True)
class NativeSpec:
    """A standard decoder and its weights.

    dtype: of the embedding [vocab, hidden], KV and hidden states. Norms are float32 [size], with the offset
    of one already in them. activation: a name of `ACTIVATIONS`. layers, embedding, head: give weights once,
    layers in order, and keep none of them: they are read when they are asked for, and who packs one and drops
    it has freed it. head: None if the embedding is the head too (`tied`), or if nobody asks for scores.
    """

    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layer_count: int
    norm_eps: float
    activation: str
    scale: float
    attention_softcap: float | None
    logits_softcap: float | None
    embedding_multiplier: float
    residual_multiplier: float
    logits_divisor: float
    ropes: tuple[NativeRope, ...]
    embedding: Callable[[], torch.Tensor]
    norm: Callable[[], torch.Tensor]
    layers: Callable[[], Iterator[NativeLayer]]
    head: Callable[[], NativeLinear] | None
    tied: bool


class NativeProduct(Protocol):
    """A packed linear layer."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., inputs] -> [..., outputs], both in the type that the layer was packed for."""


class NativeLinears(Protocol):
    """Linear layers by themselves, of a model whose other operations are torch's.

    A row's result does not depend on the others.
    """

    def pack(self, layer: NativeLinear) -> NativeProduct:
        """Pack a layer that is not gated, and keep nothing of what it was."""

    def packed(self) -> None:
        """Nothing more will be packed: gives back what that took."""

    def weight_bytes(self) -> int:
        """Return the bytes of all weights that were packed."""


class Chooser(Protocol):
    """Finds the best tokens for less than the logits cost, which are kept nowhere."""

    def choose(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [R, hidden_size] -> of each row of the logits the first of the largest, int64 [R], and its
        value, float32 [R], NaN where one of the row is. Both on the host.
        """

    def best_step(
        self, inputs: Sequence[torch.Tensor], rows: int, last_rows: torch.Tensor, last_tokens: torch.Tensor
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Prepare `choose` of the first `rows` hidden states of the model's `decode(*inputs)`, in one go.

        last_rows int64 [B]: the place of each row in last_tokens, int64 [places]. A token of the inputs that
        is below 0 is the one there, when the step is run, and what a row finds is kept there. Raises
        ValueError, as does the step.
        """


class NativeDecoder(Protocol):
    """A packed model. Its forwards take what those of `PagedModel` do, and mean the same.

    Padding, known by its slot, is not computed: its hidden states are zero.
    """

    def attach(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], block_size: int) -> None:
        """Take each layer's keys and values, [slots, kv_heads, head_dim]; the last block takes padding."""

    def clear_blocks(self, blocks: torch.Tensor) -> None:
        """Zero blocks, int64 [N], in all layers; an id may come more than once."""

    def prefill(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        context_blocks: torch.Tensor,
        context_lens: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states [B * Q, hidden_size]."""

    def select(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        context_blocks: torch.Tensor,
        context_lens: torch.Tensor,
        wanted: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A prefill of which some hidden states are wanted, for less. wanted int64 [N]: places of tokens
        that are no padding.

        Returns their hidden states [N, hidden_size], and bool [B * Q]: whether a token's keys and values in
        the last layer, and so in all of them, are numbers. Padding's are.
        """

    def decode(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        blocks: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states [B, hidden_size]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> float32 [R, vocab_size]. Raises ValueError if the model has no head."""

    @property
    def chooser(self) -> Chooser | None:
        """Its own; None for a model whose best tokens are found among all logits."""

    def weight_bytes(self) -> int:
        """Return the bytes of all weights that it took."""
