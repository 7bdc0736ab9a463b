"""What the runner drives: a decoder with two forwards of static shape over paged KV, and a head apart."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import nn

from services.engine.device import Chooser, Device
from services.engine.model.attention import (
    DecodeInputs,
    LayerCache,
    LayerSpec,
    PrefillInputs,
    decode_biases,
    prefill_masks,
)

Select = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""A prefill of which some hidden states are wanted, as `NativeDecoder.select`."""


class PagedModel(ABC):
    """A causal language model on one device.

    The forwards give hidden states and `logits` scores those that are wanted: prompt log probabilities,
    embeddings and plain sampling share one forward, and its shape does not depend on which rows sample.

    backend: which implementation serves, `decoder` or `transformers`. dtype: of weights, KV and hidden
    states. layers: one entry for each attention layer, in the model's order. Subclasses set these. chooser:
    where there is one, it has the best tokens for less than `logits` cost.
    """

    backend: str
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    chooser: Chooser | None = None

    def __init__(self, device: Device) -> None:
        self.device = device
        # 0 until `allocate_kv`.
        self.block_size = 0
        self._caches: tuple[LayerCache, ...] = ()
        self._windows: list[int | None] = []
        # Slots from here on take the writes of padding.
        self._padding_start = 0
        self.skips_padding = False
        """Whether tokens of padding cost nothing."""
        self.select: Select | None = None
        """What computes less where few hidden states are wanted, if something does."""

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """What computes, as far as torch's modules do."""
        return ()

    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes that the weights take on the device; tied ones count once."""

    @abstractmethod
    def compile_parts(self, *, norms_and_head: bool) -> None:
        """Sends each layer, or also the final norm and the head, through `Device.compile`.

        Layers of the same kind share what is compiled.
        """

    @abstractmethod
    def compile_whole(self) -> None:
        """Sends the forward through `Device.compile` as one piece, and the head as another."""

    def kv_bytes_per_token(self) -> int:
        """Bytes that one token's KV takes in all layers."""
        size = self.dtype.itemsize
        return sum(layer.kv_heads * (layer.key_dim + layer.value_dim) * size for layer in self.layers)

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Allocates the caches, zeroed: `num_blocks` blocks and one more for padding, with id num_blocks."""
        self.block_size = block_size
        self._windows = sorted({layer.window for layer in self.layers}, key=lambda window: window or 0)
        self._padding_start = num_blocks * block_size
        slots = self._padding_start + block_size
        self._caches = tuple(
            LayerCache.allocate(self.device, spec, slots, self.dtype) for spec in self.layers
        )
        self._attach(self._caches)

    @abstractmethod
    def _attach(self, caches: Sequence[LayerCache]) -> None:
        """Gives each layer its cache; `caches` has the order of `layers`."""

    @torch.inference_mode()
    def clear_blocks(self, blocks: torch.Tensor) -> None:
        """Zeroes blocks in all layers. blocks int64 [N] on the device; an id may come more than once."""
        for cache in self._caches:
            cache.clear_blocks(blocks, self.block_size)

    @torch.inference_mode()
    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor, tokens: torch.Tensor) -> None:
        """Copies the first tokens of blocks in all layers, and zeroes the other slots of the targets.

        sources, targets, tokens int64 [N] each on the device. All sources are read before a target is
        written. Targets are distinct, but for padding, which copies one block to itself.
        """
        for cache in self._caches:
            cache.copy_blocks(sources, targets, tokens, self.block_size)

    @torch.inference_mode()
    def read_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """All that blocks hold. blocks int64 [N] on the device.

        Returns [N, block_size * numbers of a token's KV]: a block's layers in order, keys before values.
        """
        parts = [part for cache in self._caches for part in cache.read_blocks(blocks, self.block_size)]
        return torch.cat(parts, dim=1)

    @torch.inference_mode()
    def write_blocks(self, blocks: torch.Tensor, data: torch.Tensor) -> None:
        """Overwrites blocks, int64 [N] on the device, with what `read_blocks` gives of a model like this.

        Of a block that comes more than once, which may be the padding block alone, either may win.
        """
        parts = iter(torch.split(data, self._part_widths, dim=1))
        for cache in self._caches:
            cache.write_blocks(blocks, next(parts), next(parts), self.block_size)

    @property
    def _part_widths(self) -> list[int]:
        """Numbers of a block's keys and values, layer by layer."""
        tokens = self.block_size
        return [
            tokens * layer.kv_heads * dim for layer in self.layers for dim in (layer.key_dim, layer.value_dim)
        ]

    @torch.inference_mode()
    def prefill(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        context_blocks: torch.Tensor,
        context_lens: torch.Tensor,
    ) -> torch.Tensor:
        """A prefill bucket of B rows with Q tokens each, after C blocks of cached context.

        tokens, positions, slots int64 [B * Q]: ids, positions in their sequence, and where each one's KV is
        written; context_blocks [B, C] block ids; context_lens [B] how many of their tokens are the row's
        own.
        Returns hidden states [B * Q, hidden_size], the final norm applied.
        """
        batch, context = context_blocks.shape
        masks = prefill_masks(
            self._windows, context_lens, tokens.shape[0] // batch, context * self.block_size
        )
        # Of use to a device only where a mask does not say it already.
        lengths = None if context else (slots < self._padding_start).view(batch, -1).sum(1)
        inputs = PrefillInputs(batch, self.block_size, slots, context_blocks, masks, lengths=lengths)
        return self._forward(tokens, positions, inputs)

    @torch.inference_mode()
    def decode(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        blocks: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor,
    ) -> torch.Tensor:
        """A decode bucket of B rows whose sequences hold J blocks together, the new tokens' included.

        tokens, positions, slots int64 [B]; blocks [J] ids, or [0] for the first J blocks as one slice; rows
        [J] the row that owns each block, B for padding; starts [J] the position of each block's first token.
        Returns hidden states [B, hidden_size], the final norm applied.
        """
        biases = decode_biases(self._windows, positions, rows, starts, self.block_size)
        return self._forward(tokens, positions, DecodeInputs(slots, blocks, rows, biases))

    @abstractmethod
    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, inputs: PrefillInputs | DecodeInputs
    ) -> torch.Tensor:
        """Hidden states [T, hidden_size] of tokens [T] at positions [T], the final norm applied."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> logits [R, vocab_size], scaled and capped as the architecture does."""
