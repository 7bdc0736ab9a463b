"""Grouped-query attention over the paged cache."""

from __future__ import annotations

import torch
from torch import nn

from services.engine.device import Device
from services.engine.model.attention import (
    NO_FEATURES,
    AttentionFeatures,
    DecodeInputs,
    LayerCache,
    LayerSpec,
    PrefillInputs,
    attend,
)
from services.engine.model.decoder.linears import QKVParallelLinear, RowParallelLinear
from services.engine.model.decoder.norms import RmsNorm
from services.engine.model.decoder.shard import Shard
from services.engine.model.decoder.spec import DecoderSpec, LayerPlan

BatchInputs = PrefillInputs | DecodeInputs


class DecoderAttention(nn.Module):
    """Query, key and value by one product, rotated, attended and joined.

    `cache` is set before the first forward. It hangs on the module, since an index into a list of caches
    would make each layer's compiled code its own.
    """

    cache: LayerCache

    def __init__(self, spec: DecoderSpec, plan: LayerPlan, shard: Shard, device: Device) -> None:
        super().__init__()
        self._device = device
        self.qkv = QKVParallelLinear(
            spec.hidden_size, spec.heads, spec.kv_heads, spec.head_dim, spec.qkv_bias, shard
        )
        self.output = RowParallelLinear(spec.heads * spec.head_dim, spec.hidden_size, spec.output_bias, shard)
        norms = [
            RmsNorm(spec.head_dim, spec.norm_eps, device, unit_offset=spec.unit_offset_norm)
            if spec.qk_norm
            else None
            for _ in range(2)
        ]
        self.query_norm, self.key_norm = norms
        self._heads, self._kv_heads = self.qkv.heads, self.qkv.kv_heads
        self._head_dim = spec.head_dim
        self._window = plan.window
        self._scale = spec.scale
        self._features = (
            AttentionFeatures(softcap=spec.attention_softcap) if spec.attention_softcap else NO_FEATURES
        )

    def layer_spec(self) -> LayerSpec:
        """Shape of this rank's KV."""
        return LayerSpec(self._kv_heads, self._head_dim, self._head_dim, self._window)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inputs: BatchInputs
    ) -> torch.Tensor:
        """x [T, hidden], cos and sin [T, 1, rotated] -> [T, hidden]."""
        heads, kv_heads = self._heads, self._kv_heads
        fused = self.qkv(x).view(-1, heads + 2 * kv_heads, self._head_dim)
        query_key, value = fused[:, : heads + kv_heads], fused[:, heads + kv_heads :]
        if self.query_norm is not None and self.key_norm is not None:
            normed = (self.query_norm(query_key[:, :heads]), self.key_norm(query_key[:, heads:]))
            query_key = torch.cat(normed, dim=1)
        query_key = self._device.rotate(query_key, cos, sin)
        mixed = attend(
            self.cache,
            query_key[:, :heads],
            query_key[:, heads:],
            value,
            inputs,
            window=self._window,
            scale=self._scale,
            features=self._features,
        )
        result: torch.Tensor = self.output(mixed.flatten(1))
        return result
