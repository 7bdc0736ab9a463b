"""Tiny random encoders, and decoders with a head for classes, on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.torch_engine import KINDS

# By model type: the body's class, and what its first position is.
ENCODERS = {"bert": ("BertModel", 0), "roberta": ("RobertaModel", 2), "xlm-roberta": ("XLMRobertaModel", 2)}


def save_encoder(kind: str, directory: Path, **changes: Any) -> Any:
    """Writes a random body of this model type and returns it."""
    name, offset = ENCODERS[kind]
    return _save(getattr(transformers, name), offset, directory, {"add_pooling_layer": False}, changes)


def break_token(directory: Path, token: int) -> None:
    """Make what follows from a token no number, in the checkpoint of any model."""
    for file in directory.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if name.endswith(("word_embeddings.weight", "wte.weight")):
                weight[token] = torch.nan
        save_file(weights, file, metadata={"format": "pt"})


def save_cross_encoder(kind: str, directory: Path, **changes: Any) -> Any:
    """The same with a head for classes, one unless told otherwise."""
    name, offset = ENCODERS[kind]
    head: Any = getattr(transformers, name.replace("Model", "ForSequenceClassification"))
    return _save(head, offset, directory, {}, {"num_labels": 1, **changes})


def save_decoder_classifier(kind: str, directory: Path, **changes: Any) -> Any:
    """The same of a decoder, as `llama`: logits of the last token's state."""
    causal, differs = KINDS[kind]
    head: Any = getattr(transformers, causal.replace("ForCausalLM", "ForSequenceClassification"))
    values = {"num_labels": 3, "num_key_value_heads": 2, "max_position_embeddings": 320, **differs, **changes}
    return _save(head, 0, directory, {}, values)


def _save(
    model_class: Any, offset: int, directory: Path, options: dict[str, Any], changes: dict[str, Any]
) -> Any:
    values: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "max_position_embeddings": 320 + offset,
        "pad_token_id": 1 if offset else 0,
        **changes,
    }
    torch.manual_seed(7)
    model = model_class(model_class.config_class(**values), **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 1.0))
    model.save_pretrained(directory)
    return model.eval()
