"""A transformers model as the runner drives it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from services.engine.device import Device
from services.engine.model.attention import DecodeInputs, LayerCache, PrefillInputs
from services.engine.model.hf_config import first_line
from services.engine.model.paged import PagedModel
from services.engine.model.transformers_backend.attention import Probe, attach_cache
from services.engine.model.transformers_backend.head import head_logits, take_body
from services.engine.model.transformers_backend.probing import probe_model, probe_tokens, unsupported


class TransformersModel(PagedModel):
    """Wraps a loaded causal language model whose attention implementation is ours.

    Batches are passed flattened to one row, [1, T]. Raises ModelError for what cannot be served so.
    """

    backend = "transformers"

    def __init__(self, model: Any, device: Device, dtype: torch.dtype) -> None:
        super().__init__(device)
        self.dtype = dtype
        self._weight_bytes = _weight_bytes(model)
        probe, whole = probe_model(model, device)
        self._body, self._head = take_body(model), model
        self.hidden_size = self._check_split(whole)
        self.vocab_size = int(whole.shape[-1])
        self.layers = tuple(probe.layers[index] for index in sorted(probe.layers))
        self._modules = [probe.modules[index] for index in sorted(probe.modules)]
        for index, layer in enumerate(self._layer_modules()):
            layer.register_forward_hook(partial(_layer_done, device, index))

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self._head,)

    def weight_bytes(self) -> int:
        return self._weight_bytes

    def compile_parts(self, *, norms_and_head: bool) -> None:
        # Which of its other modules make the final norm and the head is the architecture's own affair.
        for module in self._layer_modules():
            module.forward = self.device.compile(module.forward)

    def compile_whole(self) -> None:
        self._body.forward = self.device.compile(self._body.forward)

    def _layer_modules(self) -> list[Any]:
        attentions = {id(module) for module in self._modules}
        return [
            module
            for module in self._body.modules()
            if any(id(child) in attentions for child in module.children())
        ]

    def _attach(self, caches: Sequence[LayerCache]) -> None:
        for module, cache in zip(self._modules, caches, strict=True):
            attach_cache(module, cache)

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, inputs: PrefillInputs | DecodeInputs
    ) -> torch.Tensor:
        return _hidden(self._body, tokens, positions, inputs)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return head_logits(self._head, hidden)

    @torch.inference_mode()
    def _check_split(self, whole: torch.Tensor) -> int:
        """Body and head, one after the other, must give what the whole model gave.

        Returns the hidden size.
        """
        hidden = _hidden(self._body, *probe_tokens(self.device), Probe(self.device))
        try:
            split = self.logits(hidden)
        except Exception as error:
            raise unsupported(self._head, f"its head does not run alone: {first_line(error)}") from None
        if split.shape != whole.shape or not torch.allclose(split, whole, rtol=1e-3, equal_nan=True):
            raise unsupported(self._head, "its head is not a function of hidden states")
        return int(hidden.shape[-1])


def _hidden(
    body: Any,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    inputs: PrefillInputs | DecodeInputs | Probe,
) -> torch.Tensor:
    output = body(
        input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, paged=inputs
    )
    hidden: torch.Tensor = output.last_hidden_state
    return hidden[0]


def _layer_done(device: Device, index: int, *call: object) -> None:
    device.layer_done(index)


def _weight_bytes(model: Any) -> int:
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
