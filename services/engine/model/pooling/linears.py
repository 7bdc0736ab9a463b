"""The linear layers of an encoder by the device's own kernels, where it was asked for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from services.engine.device import Device, NativeLinear, NativeProduct


class _Packed(nn.Module):
    """Takes the place of a linear layer."""

    def __init__(self, product: NativeProduct) -> None:
        super().__init__()
        self._product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x)


def pack_linears(model: Any, device: Device, dtype: torch.dtype) -> bool:
    """Packs the linear layers of an encoder's layers one by one; False if torch is to compute them.

    Heads stay as they are: what they decide is one number. Raises DeviceError.
    """
    linears = device.native_linears(dtype)
    if linears is None:
        return False
    for block in model.base_model.encoder.layer:
        for name, layer in list(block.named_modules()):
            if isinstance(layer, nn.Linear):
                product = linears.pack(NativeLinear(layer.weight, layer.bias))
                block.set_submodule(name, _Packed(product))
    linears.packed()
    return True
