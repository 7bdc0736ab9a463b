"""Tiny random models with a tokenizer, as directories that an offline LLM loads in a second or two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.encoders import save_cross_encoder, save_encoder
from tests.support.tiny_tokenizer import VOCAB_SIZE, write_tiny_model
from tests.support.torch_engine import save_tiny_model

OPTIONS: dict[str, Any] = {"dtype": "float32", "device_threads": 1, "kv_cache_gib": 0.01, "progress": False}
"""Options of an LLM of one of these."""


def chat_model(directory: Path) -> Path:
    """A decoder with a ChatML template."""
    save_tiny_model("llama", directory, vocab_size=VOCAB_SIZE, max_position_embeddings=512, eos_token_id=2)
    return write_tiny_model(directory)


def encoder(directory: Path, **changes: Any) -> Path:
    """An encoder that embeds."""
    save_encoder("bert", directory, vocab_size=VOCAB_SIZE, **changes)
    return write_tiny_model(directory, chat_template=None)


def classifier(directory: Path, labels: int, **changes: Any) -> Path:
    """An encoder with a head for so many classes; one: it scores pairs, of which it tells no types apart."""
    values = {"vocab_size": VOCAB_SIZE, "num_labels": labels, "type_vocab_size": 1}
    save_cross_encoder("bert", directory, **{**values, **changes})
    return write_tiny_model(directory, chat_template=None, add_bos=True)
