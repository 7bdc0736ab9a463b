"""One attention layer's keys and values: their shape, and the caches that hold them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.engine.device import Device
from services.engine.model.attention.inputs import Window


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shape of one layer's KV. `window`: how many positions it looks back, None for all of them."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: Window


@dataclass(slots=True)
class LayerCache:
    """A layer's KV on its device: key [slots, kv_heads, key_dim], value [slots, kv_heads, value_dim]."""

    device: Device
    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def allocate(cls, device: Device, spec: LayerSpec, slots: int, dtype: torch.dtype) -> LayerCache:
        """Caches of `slots` tokens, zeroed."""
        key = device.zeros((slots, spec.kv_heads, spec.key_dim), dtype)
        return cls(device, key, device.zeros((slots, spec.kv_heads, spec.value_dim), dtype))

    def clear_blocks(self, blocks: torch.Tensor, block_size: int) -> None:
        """Zeroes blocks. blocks int64 [N] on the device; an id may come more than once."""
        for tensor in (self.key, self.value):
            tensor.view(-1, block_size, *tensor.shape[1:]).index_fill_(0, blocks, 0)

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor, block_size: int) -> None:
        """Copies blocks, int64 [N] each: all sources are read before a target is written."""
        for tensor in (self.key, self.value):
            paged = tensor.view(-1, block_size, *tensor.shape[1:])
            paged.index_copy_(0, targets, paged.index_select(0, sources))
