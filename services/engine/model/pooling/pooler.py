"""What an embedder drives: padded documents to vectors or classes; and decoders that do so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import nn

from services.engine.model.paged import PagedModel
from services.engine.model.pooling.settings import Activation, EmbedShapes, Pooling, PoolingSettings


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
    """Adds to `total` float32 [B, dim] what tokens [start, start + Q) give: hidden [B, Q, dim].

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
        self._model = model
        self._pooling = settings.pooling
        self.activation = settings.activation
        self._chunk = max(1, chunk // _BLOCK) * _BLOCK
        self.vocab_size = model.vocab_size
        self.dtype = model.dtype
        self.dim = model.hidden_size
        model.allocate_kv(max(rows * -(-length // _BLOCK) for rows, length in shapes.all()), _BLOCK)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self._model.modules

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
            hidden = self._model.prefill(
                part.flatten(),
                positions.flatten(),
                slots.flatten(),
                table[:, : start // _BLOCK],
                torch.full((batch,), start, dtype=torch.int64, device=tokens.device),
            )
            total = add_states(total, hidden.view(batch, -1, self.dim), start, lengths, self._pooling)
        return finish(total, lengths, self._pooling)
