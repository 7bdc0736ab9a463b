"""Embeddings from a decoder: the states of a prompt's tokens, computed in chunks over KV of its own."""

from __future__ import annotations

import torch
from torch import nn

from services.engine.model.paged import PagedModel
from services.engine.model.pooling.pooler import Pooler, add_states, finish
from services.engine.model.pooling.settings import PoolingSettings
from services.engine.model.pooling.shapes import EmbedShapes

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
