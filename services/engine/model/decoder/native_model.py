"""Our decoder where the device computes it by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.engine.device import Device, NativeDecoder
from services.engine.model.attention import LayerCache
from services.engine.model.decoder.decoder import Decoder
from services.engine.model.decoder.paged_model import DecoderModel


class NativeDecoderModel(DecoderModel):
    """A decoder whose modules say what it is like; `native` computes it, with the weights that it took."""

    def __init__(self, decoder: Decoder, device: Device, dtype: torch.dtype, native: NativeDecoder) -> None:
        super().__init__(decoder, device, dtype)
        self.native = native
        self.chooser = native.chooser
        self.select = native.select
        self.skips_padding = True

    def weight_bytes(self) -> int:
        return self.native.weight_bytes() + super().weight_bytes()

    def _attach(self, caches: Sequence[LayerCache]) -> None:
        self.native.attach([(cache.key, cache.value) for cache in caches], self.block_size)

    @torch.inference_mode()
    def clear_blocks(self, blocks: torch.Tensor) -> None:
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
        return self.native.decode(tokens, positions, slots, blocks, rows, starts)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.native.logits(hidden)
