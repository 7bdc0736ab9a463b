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
        slots = _slots(blocks, block_size)
        for tensor in (self.key, self.value):
            tensor.index_fill_(0, slots, 0)

    def copy_blocks(
        self, sources: torch.Tensor, targets: torch.Tensor, tokens: torch.Tensor, block_size: int
    ) -> None:
        """Copies the first tokens of blocks, int64 [N] each, and zeroes the other slots of the targets.

        All sources are read before a target is written.
        """
        read, written = _slots(sources, block_size), _slots(targets, block_size)
        within = torch.arange(block_size, device=tokens.device)
        beyond = (within >= tokens.unsqueeze(-1)).view(-1, 1, 1)
        for tensor in (self.key, self.value):
            tensor.index_copy_(0, written, tensor.index_select(0, read).masked_fill(beyond, 0))

    def read_blocks(self, blocks: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of blocks, int64 [N] on the device: [N, block_size * kv_heads * dim] each."""
        slots = _slots(blocks, block_size)
        count = blocks.shape[0]
        return self.key.index_select(0, slots).view(count, -1), self.value.index_select(0, slots).view(
            count, -1
        )

    def write_blocks(
        self, blocks: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block_size: int
    ) -> None:
        """Overwrites blocks, int64 [N] on the device, with what `read_blocks` gave."""
        slots = _slots(blocks, block_size)
        for tensor, new in ((self.key, keys), (self.value, values)):
            tensor.index_copy_(0, slots, new.reshape(slots.shape[0], *tensor.shape[1:]))


def _slots(blocks: torch.Tensor, block_size: int) -> torch.Tensor:
    """The slots of blocks, int64 [N * block_size].

    Caches are not written through a view by blocks: an HPU graph cannot update a view in place.
    """
    within = torch.arange(block_size, device=blocks.device)
    return (blocks.unsqueeze(-1) * block_size + within).flatten()
