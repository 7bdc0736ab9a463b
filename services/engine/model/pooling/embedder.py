"""Turns documents into vectors, batch by batch, in static shapes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import normalize

from services.engine.device import Device
from services.engine.model.checks import check_directory
from services.engine.model.errors import ModelError
from services.engine.model.facts import read_facts
from services.engine.model.opening import open_model
from services.engine.model.pooling.decoder import DecoderPooler
from services.engine.model.pooling.encoder import ENCODERS, encoder_length, load_encoder
from services.engine.model.pooling.pooler import Pooler
from services.engine.model.pooling.settings import Pooling, read_pooling
from services.engine.model.pooling.shapes import EmbedBatch, EmbedShapes

_DEFAULT_LENGTH = 4096


class EmbedError(Exception):
    """A document cannot be embedded. One readable line."""


class Embedder:
    """Embeds documents with one model on one device. Not for use by two threads at once.

    Called by whatever serves embeddings: the engine's core does so for `/v1/embeddings` once the OpenAI API
    has it, with the ids that the tokenizer service made, special tokens included.
    """

    def __init__(self, pooler: Pooler, device: Device, shapes: EmbedShapes, *, normalized: bool) -> None:
        self._pooler = pooler
        self._device = device
        self._shapes = shapes
        self._normalized = normalized
        self.max_length = shapes.lengths[-1]
        self.dim = pooler.dim

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Every (rows, length) of a forward: no document causes another one."""
        return self._shapes.all()

    def warm_up(self) -> None:
        """Runs each shape once, on padding."""
        for rows, length in self.shapes:
            self._forward(EmbedBatch(rows, length, ()), ())

    def embed(self, documents: Sequence[Sequence[int]]) -> torch.Tensor:
        """Token ids of N documents -> float32 [N, dim] on the host, in their order.

        A document's vector does not depend on the others. Raises EmbedError for an empty document, one that
        is longer than `max_length`, or an id outside the vocabulary; nothing is computed then.
        """
        self._check(documents)
        vectors = torch.empty((len(documents), self.dim), dtype=torch.float32)
        for batch in self._shapes.plan([len(document) for document in documents]):
            found = self._forward(batch, documents)
            vectors[list(batch.documents)] = self._device.to_host(found)[: len(batch.documents)]
        return vectors

    def _forward(self, batch: EmbedBatch, documents: Sequence[Sequence[int]]) -> torch.Tensor:
        tokens = torch.zeros((batch.rows, batch.length), dtype=torch.int64)
        # A padded row is a document of one token: softmax over nothing is not a number.
        lengths = torch.ones(batch.rows, dtype=torch.int64)
        for row, index in enumerate(batch.documents):
            lengths[row] = len(documents[index])
            tokens[row, : len(documents[index])] = torch.tensor(documents[index], dtype=torch.int64)
        tensors = self._device.to_device(tokens), self._device.to_device(lengths)
        self._device.shapes.note("embed", tensors)
        vectors: torch.Tensor = self._device.run_eagerly(self._pooler.pool, tensors)
        return normalize(vectors, dim=-1) if self._normalized else vectors

    def _check(self, documents: Sequence[Sequence[int]]) -> None:
        for index, document in enumerate(documents):
            count, vocab = len(document), self._pooler.vocab_size
            if not 1 <= count <= self.max_length:
                raise EmbedError(
                    f"document {index} has {count} tokens; between 1 and {self.max_length} are allowed"
                )
            if min(document) < 0 or max(document) >= vocab:
                raise EmbedError(f"document {index} has a token id outside the vocabulary of {vocab}")


def open_embedder(
    directory: Path,
    device: Device,
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    max_tokens: int = 2048,
    chunk: int = 512,
) -> Embedder:
    """Loads an embedding model: BERT-style encoders, and decoders through their hidden states.

    dtype: auto, float32, bfloat16 or float16. max_model_len: the longest document, None for the model's own.
    max_tokens: rows times length of a forward. chunk: tokens of a decoder's prompt computed at once. How
    states are pooled is read from the files of sentence-transformers; without them an encoder's vector is the
    mean and a decoder's the last token's, of length 1. Raises ModelError with one readable line.
    """
    config = check_directory(directory)
    encoder = config["model_type"] in ENCODERS
    settings = read_pooling(directory, Pooling.MEAN if encoder else Pooling.LAST)
    if encoder:
        limit = encoder_length(config)
    else:
        limit = read_facts(directory, config).max_position or max_model_len or _DEFAULT_LENGTH
    if max_model_len is not None and max_model_len > limit:
        raise ModelError(f"max-model-len {max_model_len} exceeds the model's context of {limit} tokens")
    shapes = EmbedShapes(max_model_len or min(limit, settings.max_length or limit), max_tokens)
    pooler: Pooler
    if encoder:
        pooler = load_encoder(directory, config, device, dtype=dtype, pooling=settings.pooling)
    else:
        model = open_model(directory, device, dtype=dtype, max_model_len=max_model_len)
        pooler = DecoderPooler(model, settings.pooling, shapes, chunk=chunk)
    return Embedder(pooler, device, shapes, normalized=settings.normalize)
