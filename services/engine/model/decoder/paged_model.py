"""Our decoder as the runner drives it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.engine.device import Device
from services.engine.model.attention import DecodeInputs, LayerCache, PrefillInputs
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

    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.decoder.parameters())

    def compile_layers(self) -> None:
        for layer in self.decoder.layers:
            layer.forward = self.device.compile(layer.forward)

    def _attach(self, caches: Sequence[LayerCache]) -> None:
        for attention, cache in zip(self.decoder.attentions, caches, strict=True):
            attention.cache = cache

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, inputs: PrefillInputs | DecodeInputs
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.decoder(tokens, positions, inputs)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.decoder.logits(hidden)
