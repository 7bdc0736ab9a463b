"""A transformers model as the runner drives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from services.engine.device import Device
from services.engine.model.attention import (
    DecodeInputs,
    LayerCache,
    PrefillInputs,
    decode_biases,
    prefill_masks,
)
from services.engine.model.errors import ModelError
from services.engine.model.paged import PagedModel
from services.engine.model.transformers_backend.attention import Probe, UnsupportedAttention, attach_cache
from services.engine.model.transformers_backend.head import head_logits, take_body

_PROBE_TOKENS = 4


class TransformersModel(PagedModel):
    """Wraps a loaded causal language model whose attention implementation is ours.

    Batches are passed flattened to one row, [1, T]. Raises ModelError for what cannot be served so.
    """

    backend = "transformers"

    def __init__(self, model: Any, device: Device, dtype: torch.dtype) -> None:
        super().__init__(device)
        self.dtype = dtype
        self._name = type(model).__name__
        self._weight_bytes = _weight_bytes(model)
        config = model.config.get_text_config()
        probe = Probe(device)
        whole = self._probe(model, probe, config)
        self._body, self._head = take_body(model), model
        self._check_split(whole)
        self.vocab_size = int(whole.shape[-1])
        self.hidden_size = int(config.hidden_size)
        self.layers = tuple(probe.layers[index] for index in sorted(probe.layers))
        self._modules = [probe.modules[index] for index in sorted(probe.modules)]
        self._windows = sorted({layer.window for layer in self.layers}, key=lambda window: window or 0)

    def weight_bytes(self) -> int:
        return self._weight_bytes

    def _attach(self, caches: Sequence[LayerCache]) -> None:
        for module, cache in zip(self._modules, caches, strict=True):
            attach_cache(module, cache)

    @torch.inference_mode()
    def prefill(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        context_blocks: torch.Tensor,
        context_lens: torch.Tensor,
    ) -> torch.Tensor:
        batch, context = context_blocks.shape
        masks = prefill_masks(
            self._windows, context_lens, tokens.shape[0] // batch, context * self.block_size
        )
        inputs = PrefillInputs(batch, self.block_size, slots, context_blocks, masks)
        return _hidden(self._body, tokens, positions, inputs)

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
        biases = decode_biases(self._windows, positions, rows, starts, self.block_size)
        return _hidden(self._body, tokens, positions, DecodeInputs(slots, blocks, rows, biases))

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return head_logits(self._head, hidden)

    @torch.inference_mode()
    def _probe(self, model: Any, probe: Probe, config: Any) -> torch.Tensor:
        """Runs the whole model on a few tokens, to learn what its layers are. Returns its logits."""
        tokens, positions = self._probe_tokens()
        try:
            output = model(
                input_ids=tokens.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                paged=probe,
            )
        except UnsupportedAttention as error:
            raise ModelError(f"architecture {self._name} is not supported: it needs {error}") from None
        logits: torch.Tensor = output.logits[0]
        if len(probe.layers) != config.num_hidden_layers or logits.shape[0] != _PROBE_TOKENS:
            raise ModelError(
                f"architecture {self._name} is not supported: {len(probe.layers)} of its "
                f"{config.num_hidden_layers} layers have attention that can be paged"
            )
        types = getattr(config, "layer_types", None) or []
        for index, kind in enumerate(types):
            if kind == "sliding_attention" and probe.layers[index].window is None:
                raise ModelError(
                    f"architecture {self._name} is not supported: layer {index} hides its sliding window"
                )
        return logits

    @torch.inference_mode()
    def _check_split(self, whole: torch.Tensor) -> None:
        """Body and head, one after the other, must give what the whole model gave."""
        tokens, positions = self._probe_tokens()
        split = self.logits(_hidden(self._body, tokens, positions, Probe(self.device)))
        if split.shape != whole.shape or not torch.allclose(split, whole, rtol=1e-3, equal_nan=True):
            raise ModelError(
                f"architecture {self._name} is not supported: its head is not a function of hidden states"
            )

    def _probe_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.device.torch_device
        tokens = torch.zeros(_PROBE_TOKENS, dtype=torch.int64, device=device)
        return tokens, torch.arange(_PROBE_TOKENS, device=device)


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


def _weight_bytes(model: Any) -> int:
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
