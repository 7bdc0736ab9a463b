"""Pooling: settings, static shapes of documents, poolers from token states to vectors or classes."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from services.engine.model.checks import ModelError, read_json
from services.engine.model.paged import PagedModel

_MOST = 64


@dataclass(frozen=True, slots=True)
class Dimensions:
    """`any`: every width from 1 on; else those of `widths`, rising."""

    any: bool = False
    widths: tuple[int, ...] = ()


def read_dimensions(config: Mapping[str, Any], option: str | None, width: int) -> Dimensions:
    """Read the operator's widths (`any`, or numbers with commas), else those of config.json.

    `width`: of a whole vector.

    Raises ModelError for what is no width.
    """
    if option is not None:
        parts = [part.strip() for part in option.split(",")]
        if parts == ["any"]:
            return Dimensions(any=True)
        return _widths([int(part) if part.isdecimal() else part for part in parts], width)
    listed = config.get("matryoshka_dimensions")
    if listed:
        return _widths(listed if isinstance(listed, list) else [listed], width)
    return Dimensions(any=config.get("is_matryoshka") is True)


def _widths(values: list[Any], width: int) -> Dimensions:
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= width:
            raise ModelError(f"embedding dimensions must be numbers from 1 to {width}, the model's width")
    if len(values) > _MOST:
        raise ModelError(f"there are more than {_MOST} embedding dimensions")
    return Dimensions(widths=tuple(sorted(set(values))))


_SHORTEST = 16


@dataclass(frozen=True, slots=True)
class EmbedBatch:
    """Documents, by their place in the caller's list, that one forward of `rows` x `length` tokens takes."""

    rows: int
    length: int
    documents: tuple[int, ...]


class EmbedShapes:
    """Shapes (rows, length): lengths and rows are powers of two, and what a forward may hold is limited.

    `max_tokens` limits rows * length; a single document of the maximum length is always let through.
    """

    def __init__(self, max_length: int, max_tokens: int) -> None:
        powers = (1 << exponent for exponent in range(max_length.bit_length()))
        self.lengths = (*(power for power in powers if _SHORTEST <= power < max_length), max_length)
        self._max_tokens = max_tokens

    def all(self) -> tuple[tuple[int, int], ...]:
        """Every shape that `plan` may use."""
        return tuple(
            (1 << exponent, length)
            for length in self.lengths
            for exponent in range(self.most_rows(length).bit_length())
        )

    @property
    def most_tokens(self) -> int:
        """Rows times length of the largest shape."""
        return max(rows * length for rows, length in self.all())

    def bucket(self, length: int) -> int:
        """The length of the shapes that take a document of `length` tokens, 1 to the maximum."""
        return self.lengths[bisect_left(self.lengths, length)]

    def plan(self, lengths: Sequence[int]) -> list[EmbedBatch]:
        """Group documents of like length. Lengths are between 1 and the maximum."""
        members: dict[int, list[int]] = {}
        for document, length in enumerate(lengths):
            members.setdefault(self.bucket(length), []).append(document)
        batches: list[EmbedBatch] = []
        for length, documents in sorted(members.items()):
            most = self.most_rows(length)
            for first in range(0, len(documents), most):
                part = tuple(documents[first : first + most])
                batches.append(EmbedBatch(self.rows_for(len(part)), length, part))
        return batches

    @staticmethod
    def rows_for(count: int) -> int:
        """The least power of two that is not below `count`."""
        return 1 << (count - 1).bit_length()

    def most_rows(self, length: int) -> int:
        """The largest power of two of rows that the limit allows."""
        return 1 << (max(1, self._max_tokens // length).bit_length() - 1)


class Pooling(Enum):
    """Which token states make the vector."""

    CLS = "cls"
    MEAN = "mean"
    LAST = "last"


class Activation(Enum):
    """Functions from a pooled state or logits to the answer."""

    NONE = "none"
    UNIT = "unit"
    """Scale to length 1."""
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


@dataclass(frozen=True, slots=True)
class PoolingSettings:
    """max_length: the longest document in tokens that the files allow, None if they do not say."""

    pooling: Pooling
    normalize: bool
    max_length: int | None = None

    @property
    def activation(self) -> Activation:
        """Return the steps that are left to do to a vector."""
        return Activation.UNIT if self.normalize else Activation.NONE


# Names in 1_Pooling/config.json; None: known to sentence-transformers, not computed here.
_MODES: dict[str, Pooling | None] = {
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_max_tokens": None,
    "pooling_mode_mean_sqrt_len_tokens": None,
    "pooling_mode_weightedmean_tokens": None,
}
_NAMED = {"cls": Pooling.CLS, "mean": Pooling.MEAN, "lasttoken": Pooling.LAST}


def read_pooling(directory: Path, default: Pooling) -> PoolingSettings:
    """The settings of a checkpoint; `default` and vectors of length 1 where no file says otherwise.

    Raises ModelError for modules or ways of pooling that are not computed here.
    """
    modules = directory / "modules.json"
    if not modules.is_file():
        return PoolingSettings(default, normalize=True)
    pooling, normalize = default, False
    for module in _read_list(modules):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            # A plain directory of this one: a path that points elsewhere is not followed.
            pooling = _pooling(directory / Path(str(module.get("path", ""))).name / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ModelError(f"{modules} has a module of type {kind}, which is not supported")
    return PoolingSettings(pooling, normalize, _max_length(directory / "sentence_bert_config.json"))


def _read_list(path: Path) -> list[dict[str, Any]]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not valid JSON") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ModelError(f"{path} does not hold a list of modules")
    return value


def _pooling(path: Path) -> Pooling:
    config = read_json(path)
    named = config.get("pooling_mode")
    if isinstance(named, str):
        chosen = [_NAMED.get(named)]
    else:
        chosen = [mode for name, mode in _MODES.items() if config.get(name)]
    if len(chosen) != 1 or chosen[0] is None:
        raise ModelError(f"{path} asks for a way of pooling that is not one of cls, mean and lasttoken")
    return chosen[0]


def _max_length(path: Path) -> int | None:
    value = read_json(path).get("max_seq_length") if path.is_file() else None
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ModelError(f"{path} has a max_seq_length of {value!r}, which is no length")
    return value


class Pooler(ABC):
    """A model on one device.

    dim: the vectors' width; for a model that scores 1, for one that classifies the number of classes.
    dtype: of its states. activation: what is left to do to a row of `pool`.
    """

    vocab_size: int
    dtype: torch.dtype
    activation: Activation
    # Called between the parts of a long forward: whoever waits sees that it goes on.
    on_chunk: Callable[[], None] = staticmethod(lambda: None)
    dim: int

    @property
    @abstractmethod
    def modules(self) -> tuple[nn.Module, ...]:
        """The model's, as far as torch's modules compute it."""

    @abstractmethod
    def pool(self, tokens: torch.Tensor, lengths: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
        """tokens int64 [B, L], each row's first `lengths` [B] (at least 1) its own -> float32 [B, dim].

        seconds int64 [B]: where the second of two texts begins, L in a row of one text; only models that tell
        texts apart look at it. What a row gives does not depend on the others, nor on padding.
        """


def add_states(
    total: torch.Tensor, hidden: torch.Tensor, start: int, lengths: torch.Tensor, pooling: Pooling
) -> torch.Tensor:
    """Add to `total` float32 [B, dim] what tokens [start, start + Q) give: hidden [B, Q, dim].

    Over all chunks of the rows this sums the one state that is wanted, or all of them.
    """
    positions = start + torch.arange(hidden.shape[1], device=hidden.device)
    if pooling is Pooling.CLS:
        wanted = (positions == 0).expand(hidden.shape[:2])
    elif pooling is Pooling.LAST:
        wanted = positions == lengths.unsqueeze(1) - 1
    else:
        wanted = positions < lengths.unsqueeze(1)
    # Padding is dropped, not multiplied by zero: it may hold anything.
    return total + hidden.float().masked_fill(~wanted.unsqueeze(2), 0.0).sum(1)


def finish(total: torch.Tensor, lengths: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """The pooled states [B, dim] from the sum of `add_states`."""
    return total / lengths.unsqueeze(1) if pooling is Pooling.MEAN else total


_BLOCK = 32


class DecoderPooler(Pooler):
    """Runs documents as prefill rows. Row r has the same blocks in every forward, so tables are constants.

    Padding comes after a row's tokens, where causal attention never looks; its KV is written into the row's
    own blocks. Every slot that a chunk reads was written by an earlier chunk of the same forward.
    """

    def __init__(
        self, model: PagedModel, settings: PoolingSettings, shapes: EmbedShapes, *, chunk: int
    ) -> None:
        self.model = model
        self._pooling = settings.pooling
        self.activation = settings.activation
        self._chunk = max(1, chunk // _BLOCK) * _BLOCK
        self.vocab_size = model.vocab_size
        self.dtype = model.dtype
        self.dim = model.hidden_size
        model.allocate_kv(max(rows * -(-length // _BLOCK) for rows, length in shapes.all()), _BLOCK)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self.model.modules

    @torch.inference_mode()
    def pool(self, tokens: torch.Tensor, lengths: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
        batch, length = tokens.shape
        total = torch.zeros((batch, self.dim), dtype=torch.float32, device=tokens.device)
        per_row = -(-length // _BLOCK)
        table = torch.arange(batch * per_row, device=tokens.device).view(batch, per_row)
        for start in range(0, length, self._chunk):
            if start:
                self.on_chunk()
            part = tokens[:, start : start + self._chunk]
            positions = (start + torch.arange(part.shape[1], device=tokens.device)).expand(part.shape)
            slots = table[:, :1] * _BLOCK + positions
            hidden = self.model.prefill(
                part.flatten(),
                positions.flatten(),
                slots.flatten(),
                table[:, : start // _BLOCK],
                torch.full((batch,), start, dtype=torch.int64, device=tokens.device),
            )
            total = add_states(total, hidden.view(batch, -1, self.dim), start, lengths, self._pooling)
        return finish(total, lengths, self._pooling)
