"""BERT-style encoders: every token attends to all tokens of its document."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface

from services.engine.device import Device
from services.engine.model.errors import ModelError
from services.engine.model.pooling.pooler import Pooler, add_states, finish
from services.engine.model.pooling.settings import Pooling
from services.engine.model.transformers_backend import first_line, load_module

_IMPLEMENTATION = "catenary_bidirectional"

# By model type: the class, and whether positions begin after the padding's id, as RoBERTa's do.
ENCODERS = {
    "bert": ("BertModel", False),
    "roberta": ("RobertaModel", True),
    "xlm-roberta": ("XLMRobertaModel", True),
}


@dataclass(frozen=True, slots=True)
class _Documents:
    """mask bool [B, 1, L, L]: True where the key is a token of the row's document."""

    device: Device
    mask: torch.Tensor


class Encoder(Pooler):
    """An encoder of transformers, its attention on the device."""

    def __init__(self, model: Any, device: Device, pooling: Pooling, first_position: int) -> None:
        self._model = model
        self._device = device
        self._pooling = pooling
        self._first = first_position
        self.vocab_size = int(model.config.vocab_size)
        self.dim = int(model.config.hidden_size)

    @torch.inference_mode()
    def pool(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        batch, length = tokens.shape
        positions = torch.arange(length, device=tokens.device)
        known = (positions < lengths.unsqueeze(1)).view(batch, 1, 1, length)
        hidden = self._model(
            input_ids=tokens,
            position_ids=(positions + self._first).expand(batch, length),
            token_type_ids=torch.zeros_like(tokens),
            documents=_Documents(self._device, known.expand(batch, 1, length, length)),
        ).last_hidden_state
        total = torch.zeros((batch, self.dim), dtype=torch.float32, device=tokens.device)
        return finish(add_states(total, hidden, 0, lengths, self._pooling), lengths, self._pooling)


def encoder_length(config: dict[str, Any]) -> int:
    """The longest document that an encoder's table of positions holds. Raises ModelError."""
    table = config.get("max_position_embeddings")
    first = _first_position(config)
    if not isinstance(table, int) or table <= first:
        raise ModelError(f"config.json has max_position_embeddings of {table!r}, which is no length")
    return table - first


def load_encoder(
    directory: Path, raw: dict[str, Any], device: Device, *, dtype: str, pooling: Pooling
) -> Encoder:
    """Loads a checked directory with the parsed config `raw`, of a type in ENCODERS. Raises ModelError."""
    if raw.get("is_decoder"):
        raise ModelError(f"model {directory} is a {raw['model_type']} decoder, which is not supported")
    kind: Any = getattr(transformers, ENCODERS[raw["model_type"]][0])
    try:
        config = kind.config_class.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        raise ModelError(f"model {directory} cannot be loaded: {first_line(error)}") from None
    model, _ = load_module(
        kind,
        directory,
        config,
        device,
        dtype=dtype,
        attention=_IMPLEMENTATION,
        add_pooling_layer=False,
    )
    model.to(device.torch_device).eval().requires_grad_(False)
    return Encoder(model, device, pooling, _first_position(raw))


def _first_position(config: dict[str, Any]) -> int:
    return int(config.get("pad_token_id", 1)) + 1 if ENCODERS[config["model_type"]][1] else 0


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
    out = documents.device.attend_prefill(query, key, value, documents.mask, scaling)
    return out.transpose(1, 2), None


AttentionInterface.register(_IMPLEMENTATION, _attention)
