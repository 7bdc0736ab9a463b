"""Our decoder as the runner drives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from services.engine.device import Device
from services.engine.model.attention import DecodeInputs, LayerCache, PrefillInputs
from services.engine.model.decoder.decoder import Decoder
from services.engine.model.paged import PagedModel


class DecoderModel(PagedModel):
    """A loaded `Decoder` with paged KV, computed by its modules."""

    backend = "decoder"

    def __init__(self, decoder: Decoder, device: Device, dtype: torch.dtype) -> None:
        super().__init__(device)
        self.dtype = dtype
        self.vocab_size = decoder.spec.vocab_size
        self.hidden_size = decoder.spec.hidden_size
        self.decoder = decoder
        self._body: Callable[..., torch.Tensor] = decoder.forward
        self._head: Callable[..., torch.Tensor] = decoder.logits
        self.layers = tuple(attention.layer_spec() for attention in decoder.attentions)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.decoder,)

    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.decoder.parameters())

    def compile_parts(self, *, norms_and_head: bool) -> None:
        compiled, decoder = self.device.compile, self.decoder
        for layer in decoder.layers:
            layer.forward = compiled(layer.forward)
        if norms_and_head:
            decoder.close = compiled(decoder.close)
            self._head = compiled(self._head)

    def compile_whole(self) -> None:
        self._body = self.device.compile(self._body)
        self._head = self.device.compile(self._head)

    def _attach(self, caches: Sequence[LayerCache]) -> None:
        for attention, cache in zip(self.decoder.attentions, caches, strict=True):
            attention.cache = cache

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, inputs: PrefillInputs | DecodeInputs
    ) -> torch.Tensor:
        return self._body(tokens, positions, inputs)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)
