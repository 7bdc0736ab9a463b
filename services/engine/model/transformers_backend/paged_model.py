"""A transformers model as the runner drives it: two forwards of static shape over paged KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from services.engine.device import Device
from services.engine.model.errors import ModelError
from services.engine.model.transformers_backend.attention import (
    LayerCache,
    LayerSpec,
    Probe,
    UnsupportedAttention,
    attach_cache,
    cache_of,
)
from services.engine.model.transformers_backend.inputs import (
    DecodeInputs,
    PrefillInputs,
    decode_biases,
    prefill_masks,
)

_PROBE_TOKENS = 4


class PagedModel:
    """Wraps a loaded causal language model whose attention implementation is ours.

    Batches are passed flattened to one row, [1, T]: then `logits_to_keep` can pick any token of any row, and
    whatever the architecture does to its logits stays in place.
    """

    def __init__(self, model: Any, device: Device, dtype: torch.dtype) -> None:
        self._model = model
        self._device = device
        self.dtype = dtype
        self.block_size = 0
        probe = Probe(device)
        logits = self._probe(probe)
        self.vocab_size = int(logits.shape[-1])
        self.layers: tuple[LayerSpec, ...] = tuple(probe.layers[index] for index in sorted(probe.layers))
        self._modules = [probe.modules[index] for index in sorted(probe.modules)]
        self._windows = sorted({layer.window for layer in self.layers}, key=lambda window: window or 0)

    def kv_bytes_per_token(self) -> int:
        """Bytes that one token's KV takes in all layers."""
        size = self.dtype.itemsize
        return sum(layer.kv_heads * (layer.key_dim + layer.value_dim) * size for layer in self.layers)

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Allocates the caches, zeroed: `num_blocks` blocks and one more for padding."""
        self.block_size = block_size
        slots = (num_blocks + 1) * block_size
        for spec, module in zip(self.layers, self._modules, strict=True):
            key = self._device.zeros((slots, spec.kv_heads, spec.key_dim), self.dtype)
            value = self._device.zeros((slots, spec.kv_heads, spec.value_dim), self.dtype)
            attach_cache(module, LayerCache(self._device, key, value))

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Zeroes blocks in all layers."""
        ids = self._device.to_device(torch.tensor(list(blocks), dtype=torch.int64))
        for module in self._modules:
            cache = cache_of(module)
            for tensor in (cache.key, cache.value):
                tensor.view(-1, self.block_size, *tensor.shape[1:]).index_fill_(0, ids, 0)

    @torch.inference_mode()
    def prefill(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        context_blocks: torch.Tensor,
        context_lens: torch.Tensor,
        keep: torch.Tensor,
    ) -> torch.Tensor:
        """tokens, positions, slots [B * Q]; context_blocks [B, C]; context_lens [B]; keep [R] flat token
        indexes.

        Returns logits [R, vocab] of the kept tokens.
        """
        batch, context = context_blocks.shape
        masks = prefill_masks(
            self._windows, context_lens, tokens.shape[0] // batch, context * self.block_size
        )
        inputs = PrefillInputs(batch, self.block_size, slots, context_blocks, masks)
        return self._forward(tokens, positions, inputs, keep)

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
        """tokens, positions, slots [B]; blocks, rows, starts [J]. Returns logits [B, vocab]."""
        biases = decode_biases(self._windows, positions, rows, starts, self.block_size)
        return self._forward(tokens, positions, DecodeInputs(slots, blocks, rows, biases), 0)

    def _forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        inputs: PrefillInputs | DecodeInputs | Probe,
        keep: torch.Tensor | int,
    ) -> torch.Tensor:
        output = self._model(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=keep,
            paged=inputs,
        )
        logits: torch.Tensor = output.logits
        return logits[0]

    @torch.inference_mode()
    def _probe(self, probe: Probe) -> torch.Tensor:
        name = type(self._model).__name__
        tokens = torch.zeros(_PROBE_TOKENS, dtype=torch.int64, device=self._device.torch_device)
        positions = torch.arange(_PROBE_TOKENS, device=self._device.torch_device)
        try:
            logits = self._forward(tokens, positions, probe, 0)
        except UnsupportedAttention as error:
            raise ModelError(f"architecture {name} is not supported: it needs {error}") from None
        config = self._model.config.get_text_config()
        if len(probe.layers) != config.num_hidden_layers or logits.shape[0] != _PROBE_TOKENS:
            raise ModelError(
                f"architecture {name} is not supported: {len(probe.layers)} of its "
                f"{config.num_hidden_layers} layers have attention that can be paged"
            )
        types = getattr(config, "layer_types", None) or []
        for index, kind in enumerate(types):
            if kind == "sliding_attention" and probe.layers[index].window is None:
                raise ModelError(
                    f"architecture {name} is not supported: layer {index} hides its sliding window"
                )
        return logits
