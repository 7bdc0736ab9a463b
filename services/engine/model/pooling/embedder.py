"""Turn documents into vectors, batch by batch, in static shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import normalize

from services.engine.device import Device
from services.engine.model.checks import ModelError, check_directory
from services.engine.model.decoder import UnsupportedByDecoder
from services.engine.model.facts import ENCODERS, Task, has_class_head, read_facts
from services.engine.model.open_model import open_model
from services.engine.model.paged import PagedModel
from services.engine.model.pooling.encoder import encoder_length, load_encoder
from services.engine.model.pooling.pooler import (
    Activation,
    DecoderPooler,
    EmbedShapes,
    Pooler,
    Pooling,
    PoolingSettings,
    read_pooling,
)
from services.engine.model.pooling.scoring import (
    YesNoPooler,
    add_class_head,
    check_class_head,
    load_headed,
    yes_and_no,
)

_DEFAULT_LENGTH = 4096
_GIB = 2**30


class EmbedError(Exception):
    """A document cannot be embedded. One readable line."""


class Embedder:
    """Turns documents into vectors, or into scores or probabilities of classes, with one model on one device.

    Takes the ids that the tokenizer service made, special tokens included. Not for use by two threads at
    once.
    """

    def __init__(self, pooler: Pooler, device: Device, shapes: EmbedShapes) -> None:
        self.pooler = pooler
        self._device = device
        self.shapes = shapes
        self.max_length = shapes.lengths[-1]
        self.dim = pooler.dim
        self.vocab_size = pooler.vocab_size
        self.dtype = pooler.dtype

    def watch(self, on_chunk: Callable[[], None]) -> None:
        """Have `on_chunk` called between the parts of a long forward."""
        self.pooler.on_chunk = on_chunk

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The model's, as far as torch's modules compute it."""
        return self.pooler.modules

    def warm_up(self) -> None:
        """Run each shape once, on padding."""
        for rows, length in self.shapes.all():
            self.rehearse(rows, length)

    def rehearse(self, rows: int, length: int) -> None:
        """Run a shape on padding."""
        self._device.stream.to_host(self._forward(rows, length, (), ()))

    def compute(
        self, rows: int, length: int, documents: Sequence[Sequence[int]], seconds: Sequence[int] = ()
    ) -> torch.Tensor:
        """One forward of a shape: ids of N documents that fit in -> float32 [N, dim] on the host.

        `finish` makes answers of them.

        seconds: for each document where the second of two texts begins, 0 for one text; none: all of one
        text. The ids are not checked.
        """
        found = self._forward(rows, length, documents, seconds)
        return self._device.stream.to_host(found)[: len(documents)]

    def finish(self, found: torch.Tensor, *, dimensions: int = 0, raw: bool = False) -> torch.Tensor:
        """The answers from rows of `compute`, float32 [N, dim], or from one row, float32 [dim].

        dimensions: leading numbers to keep, scaled to length 1; 0: all. raw: without the model's last step,
        which is scaling to length 1, or a sigmoid or softmax of logits.
        """
        found = found[..., :dimensions] if dimensions else found
        match Activation.NONE if raw else self.pooler.activation:
            case Activation.SIGMOID:
                return found.sigmoid()
            case Activation.SOFTMAX:
                return found.softmax(dim=-1)
            case Activation.UNIT:
                return normalize(found, dim=-1)
            case _:
                return normalize(found, dim=-1) if dimensions and not raw else found

    def embed(self, documents: Sequence[Sequence[int]], seconds: Sequence[int] = ()) -> torch.Tensor:
        """Token ids of N documents -> float32 [N, dim] on the host, in their order.

        A document's vector does not depend on the others. Raises EmbedError for an empty document, one that
        is longer than `max_length`, or an id outside the vocabulary; nothing is computed then.
        """
        self._check(documents)
        vectors = torch.empty((len(documents), self.dim), dtype=torch.float32)
        for batch in self.shapes.plan([len(document) for document in documents]):
            chosen = list(batch.documents)
            vectors[chosen] = self.compute(
                batch.rows,
                batch.length,
                [documents[index] for index in chosen],
                [seconds[index] for index in chosen] if seconds else (),
            )
        return self.finish(vectors)

    def _forward(
        self, rows: int, length: int, documents: Sequence[Sequence[int]], seconds: Sequence[int]
    ) -> torch.Tensor:
        tokens = torch.zeros((rows, length), dtype=torch.int64)
        # A padded row is a document of one token: softmax over nothing is not a number.
        lengths = torch.ones(rows, dtype=torch.int64)
        starts = torch.full((rows,), length, dtype=torch.int64)
        for row, document in enumerate(documents):
            lengths[row] = len(document)
            tokens[row, : len(document)] = torch.tensor(document, dtype=torch.int64)
            if seconds and seconds[row]:
                starts[row] = seconds[row]
        tensors = tuple(self._device.memory.to_device(tensor) for tensor in (tokens, lengths, starts))
        self._device.execution.shapes.note("embed", tensors)
        vectors: torch.Tensor = self._device.execution.run_eagerly(self.pooler.pool, tensors)
        return vectors

    def _check(self, documents: Sequence[Sequence[int]]) -> None:
        for index, document in enumerate(documents):
            count, vocab = len(document), self.vocab_size
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
    task: Task = Task.EMBED,
    dtype: str = "auto",
    max_model_len: int | None = None,
    max_tokens: int = 2048,
    chunk: int = 512,
    backend: str = "auto",
) -> Embedder:
    """Load a model that embeds, scores or classifies: BERT-style encoders, and decoders by their states.

    dtype: auto, float32, bfloat16 or float16. max_model_len: the longest document, None for the model's own.
    max_tokens: rows times length of a forward. chunk: tokens of a decoder's prompt computed at once. backend:
    what computes a decoder, see `open_model`. How states are pooled is read from the files of
    sentence-transformers; without them an encoder's vector is the mean and a decoder's the last token's, of
    length 1. Raises ModelError with one readable line.
    """
    config = check_directory(directory)
    encoder = config["model_type"] in ENCODERS
    if encoder and backend == "decoder":
        raise ModelError("model-backend decoder is for models that generate: this one is an encoder")
    settings = read_pooling(directory, Pooling.MEAN if encoder else Pooling.LAST)
    if encoder:
        limit = encoder_length(config)
    else:
        limit = read_facts(directory, config).max_position or max_model_len or _DEFAULT_LENGTH
    if max_model_len is not None and max_model_len > limit:
        raise ModelError(f"max-model-len {max_model_len} exceeds the model's context of {limit} tokens")
    shapes = EmbedShapes(max_model_len or min(limit, settings.max_length or limit), max_tokens)
    pooler: Pooler
    if encoder and task is not Task.EMBED:
        pooler = load_headed(directory, config, device, dtype=dtype)
    elif encoder:
        pooler = load_encoder(directory, config, device, dtype=dtype, settings=settings)
    else:
        open_body = partial(open_model, directory, device, dtype=dtype, max_model_len=max_model_len)
        if task is not Task.EMBED:
            settings = PoolingSettings(Pooling.LAST, normalize=False)

        def states_of(model: PagedModel) -> DecoderPooler:
            _check_kv(model, shapes)
            return DecoderPooler(model, settings, shapes, chunk=chunk)

        if has_class_head(config):
            check_class_head(directory, config, backend)
            pooler = add_class_head(directory, config, states_of(_known_body(directory, open_body)), device)
        elif task is Task.SCORE:
            answers = yes_and_no(directory)
            model = open_body(backend=backend)
            pooler = YesNoPooler(model, states_of(model), *answers)
        else:
            pooler = states_of(open_body(backend=backend, scores=False))
    return Embedder(pooler, device, shapes)


def _known_body(directory: Path, open_body: Callable[..., PagedModel]) -> PagedModel:
    """Return the body below a decoder's head for classes, of our decoder alone. Raises ModelError."""
    try:
        return open_body(backend="decoder", scores=False)
    except UnsupportedByDecoder as error:
        raise ModelError(
            f"model {directory} is a decoder with a head for classes, which is supported of models that our "
            f"decoder runs: it does not know {error.what}"
        ) from None


def _check_kv(model: PagedModel, shapes: EmbedShapes) -> None:
    needed = shapes.most_tokens * model.kv_bytes_per_token()
    free = model.device.memory.figures().free
    if needed > free:
        raise ModelError(
            f"the KV of a document of {shapes.lengths[-1]} tokens takes {needed / _GIB:.2f} GiB and "
            f"{free / _GIB:.2f} GiB of the device's memory are free: set a lower max-model-len"
        )
