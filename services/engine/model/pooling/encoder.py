"""BERT-style encoders: every token attends to all tokens of its document."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface

from catenary.telemetry import get_logger
from services.engine.device import Device, DeviceError, Kernels, NativeLinear, NativeProduct
from services.engine.model.checks import ModelError
from services.engine.model.facts import ENCODERS
from services.engine.model.hf_config import first_line
from services.engine.model.pooling.pooler import Pooler, PoolingSettings, add_states, finish
from services.engine.model.transformers_backend import load_module


class _Packed(nn.Module):
    """Takes the place of a linear layer."""

    def __init__(self, product: NativeProduct) -> None:
        super().__init__()
        self._product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x)


def pack_linears(model: Any, kernels: Kernels, dtype: torch.dtype) -> bool:
    """Pack the linear layers of an encoder's layers one by one; False if torch is to compute them.

    Heads stay as they are: what they decide is one number. Raises DeviceError.
    """
    linears = kernels.native_linears(dtype)
    if linears is None:
        return False
    for block in model.base_model.encoder.layer:
        for name, layer in list(block.named_modules()):
            if isinstance(layer, nn.Linear):
                product = linears.pack(NativeLinear(layer.weight, layer.bias))
                block.set_submodule(name, _Packed(product))
    linears.packed()
    return True


log = get_logger(__name__)

_IMPLEMENTATION = "catenary_bidirectional"


@dataclass(frozen=True, slots=True)
class _Documents:
    """mask bool [B, 1, L, L]: True where the key is a token of the row's document."""

    kernels: Kernels
    mask: torch.Tensor


class EncoderModel:
    """An encoder of transformers, its attention on the device. With a head for classes if it has one.

    `model` is the module; `output` what it returns for padded documents.
    """

    def __init__(self, model: Any, device: Device, dtype: torch.dtype, first_position: int) -> None:
        self.model = model
        self.dtype = dtype
        self._device = device
        self._first = first_position
        # A model that knows one type of token does not tell two texts apart.
        self._types = int(getattr(model.config, "type_vocab_size", 1))

    def output(self, tokens: torch.Tensor, lengths: torch.Tensor, seconds: torch.Tensor) -> Any:
        """See Pooler.pool for the tensors."""
        batch, length = tokens.shape
        positions = torch.arange(length, device=tokens.device)
        known = (positions < lengths.unsqueeze(1)).view(batch, 1, 1, length)
        types = positions >= seconds.unsqueeze(1) if self._types > 1 else torch.zeros_like(tokens)
        return self.model(
            input_ids=tokens,
            position_ids=(positions + self._first).expand(batch, length),
            token_type_ids=types.to(tokens.dtype),
            documents=_Documents(self._device.kernels, known.expand(batch, 1, length, length)),
        )


class Encoder(Pooler):
    """Vectors from an encoder's last states."""

    def __init__(self, encoder: EncoderModel, settings: PoolingSettings) -> None:
        self._encoder = encoder
        self._pooling = settings.pooling
        self.activation = settings.activation
        self.vocab_size = int(encoder.model.config.vocab_size)
        self.dtype = encoder.dtype
        self.dim = int(encoder.model.config.hidden_size)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self._encoder.model,)

    @torch.inference_mode()
    def pool(self, tokens: torch.Tensor, lengths: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
        hidden = self._encoder.output(tokens, lengths, seconds).last_hidden_state
        total = torch.zeros((tokens.shape[0], self.dim), dtype=torch.float32, device=tokens.device)
        return finish(add_states(total, hidden, 0, lengths, self._pooling), lengths, self._pooling)


def encoder_length(config: dict[str, Any]) -> int:
    """The longest document that an encoder's table of positions holds. Raises ModelError."""
    table = config.get("max_position_embeddings")
    first = _first_position(config)
    if not isinstance(table, int) or table <= first:
        raise ModelError(f"config.json has max_position_embeddings of {table!r}, which is no length")
    return table - first


def load_encoder(
    directory: Path, raw: dict[str, Any], device: Device, *, dtype: str, settings: PoolingSettings
) -> Encoder:
    """Load a checked directory with the parsed config `raw`, of a type in ENCODERS. Raises ModelError."""
    name = ENCODERS[raw["model_type"]][0]
    return Encoder(load_body(directory, raw, device, name, dtype=dtype, add_pooling_layer=False), settings)


def load_body(
    directory: Path, raw: dict[str, Any], device: Device, name: str, *, dtype: str, **options: Any
) -> EncoderModel:
    """The same for the class of transformers of this name; `options` go to it. Raises ModelError."""
    if raw.get("is_decoder"):
        raise ModelError(f"model {directory} is a {raw['model_type']} decoder, which is not supported")
    kind: Any = getattr(transformers, name)
    try:
        config = kind.config_class.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        raise ModelError(f"model {directory} cannot be loaded: {first_line(error)}") from None
    model, chosen = load_module(
        kind, directory, config, device, dtype=dtype, attention=_IMPLEMENTATION, **options
    )
    model.to(device.torch_device).eval().requires_grad_(False)
    try:
        packed = pack_linears(model, device.kernels, chosen)
    except DeviceError as error:
        raise ModelError(str(error)) from None
    if packed:
        log.info(
            "the device's kernels compute the encoder's linear layers", asked_for=device.kernels.needs_native
        )
    return EncoderModel(model, device, chosen, _first_position(raw))


def _first_position(config: dict[str, Any]) -> int:
    return int(config.get("pad_token_id", 1)) + 1 if ENCODERS[config["model_type"]][2] else 0


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    documents: _Documents,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query, key, value [B, heads, L, d] -> [B, L, heads, d]."""
    out = documents.kernels.attend_prefill(query, key, value, documents.mask, scaling)
    return out.transpose(1, 2), None


AttentionInterface.register(_IMPLEMENTATION, _attention)
