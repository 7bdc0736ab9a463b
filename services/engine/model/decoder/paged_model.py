"""Our decoder as the runner drives it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.engine.device import Device
from services.engine.model.attention import (
    DecodeInputs,
    LayerCache,
    PrefillInputs,
    decode_biases,
    prefill_masks,
)
from services.engine.model.decoder.decoder import Decoder
from services.engine.model.paged import PagedModel


class DecoderModel(PagedModel):
    """A loaded `Decoder` with paged KV."""

    backend = "decoder"

    def __init__(self, decoder: Decoder, device: Device, dtype: torch.dtype) -> None:
        super().__init__(device)
        self.dtype = dtype
        self.vocab_size = decoder.spec.vocab_size
        self.hidden_size = decoder.spec.hidden_size
        self.decoder = decoder
        self.layers = tuple(attention.layer_spec() for attention in decoder.attentions)
        self._windows = sorted({layer.window for layer in self.layers}, key=lambda window: window or 0)

    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.decoder.parameters())

    def compile_layers(self) -> None:
        for layer in self.decoder.layers:
            layer.forward = self.device.compile(layer.forward)

    def _attach(self, caches: Sequence[LayerCache]) -> None:
        for attention, cache in zip(self.decoder.attentions, caches, strict=True):
            attention.cache = cache

    @torch.inference_mode()
    def prefill(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        context_blocks: torch.Tensor,
        context_lens: torch.Tensor,
    ) -> torch.Tensor:
        batch, context = context_blocks.shape
        masks = prefill_masks(
            self._windows, context_lens, tokens.shape[0] // batch, context * self.block_size
        )
        inputs = PrefillInputs(batch, self.block_size, slots, context_blocks, masks)
        hidden: torch.Tensor = self.decoder(tokens, positions, inputs)
        return hidden

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
        biases = decode_biases(self._windows, positions, rows, starts, self.block_size)
        hidden: torch.Tensor = self.decoder(tokens, positions, DecodeInputs(slots, blocks, rows, biases))
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.decoder.logits(hidden)
