"""Our decoder as the runner drives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from services.engine.device import Device, NativeDecoder
from services.engine.model.attention import DecodeInputs, LayerCache, PrefillInputs
from services.engine.model.decoder.decoder import Decoder
from services.engine.model.paged import PagedModel


class DecoderModel(PagedModel):
    """A loaded `Decoder` with paged KV. native: what computes it instead of its modules, with its weights."""

    backend = "decoder"

    def __init__(
        self, decoder: Decoder, device: Device, dtype: torch.dtype, native: NativeDecoder | None = None
    ) -> None:
        super().__init__(device)
        self.dtype = dtype
        self.vocab_size = decoder.spec.vocab_size
        self.hidden_size = decoder.spec.hidden_size
        self.decoder = decoder
        self.native = native
        self.chooser = None if native is None else native.chooser
        self.skips_padding = native is not None
        self.select = None if native is None else native.select
        self._body: Callable[..., torch.Tensor] = decoder.forward
        self._head: Callable[..., torch.Tensor] = decoder.logits
        self.layers = tuple(attention.layer_spec() for attention in decoder.attentions)

    def weight_bytes(self) -> int:
        packed = 0 if self.native is None else self.native.weight_bytes()
        return packed + sum(parameter.nbytes for parameter in self.decoder.parameters())

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
        if self.native is not None:
            self.native.attach([(cache.key, cache.value) for cache in caches], self.block_size)

    @torch.inference_mode()
    def clear_blocks(self, blocks: torch.Tensor) -> None:
        if self.native is None:
            super().clear_blocks(blocks)
        else:
            self.native.clear_blocks(blocks)

    @torch.inference_mode()
    def prefill(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        context_blocks: torch.Tensor,
        context_lens: torch.Tensor,
    ) -> torch.Tensor:
        if self.native is None:
            return super().prefill(tokens, positions, slots, context_blocks, context_lens)
        return self.native.prefill(tokens, positions, slots, context_blocks, context_lens)

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
        if self.native is None:
            return super().decode(tokens, positions, slots, blocks, rows, starts)
        return self.native.decode(tokens, positions, slots, blocks, rows, starts)

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, inputs: PrefillInputs | DecodeInputs
    ) -> torch.Tensor:
        return self._body(tokens, positions, inputs)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden) if self.native is None else self.native.logits(hidden)
