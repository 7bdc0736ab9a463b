"""The device side of a step: forwards of static shape around the buffers that outlive it.

Hidden states of rows that sample wait in `hidden` for the head, and tokens in `last_tokens` for the next
step, which therefore needs no word from the host about them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from services.engine.device import Device
from services.engine.model.paged import PagedModel
from services.engine.runner.batches import PENDING
from services.engine.runner.layout import KvLayout
from services.engine.runner.turns import StepTurns
from services.engine.sampling.static import StaticBuffers


class Phases:
    """The computations that a step is made of, for up to `max_rows` rows. `spare_row` takes padding.

    hidden [max_rows + 1, hidden_size]; last_tokens int64 [max_rows + 1], by `Sequence.row`.
    """

    def __init__(self, model: PagedModel, device: Device, layout: KvLayout, max_rows: int) -> None:
        self._model = model
        self._layout = layout
        self.turns = StepTurns()
        self.chooser = model.chooser
        self.spare_row = max_rows
        self.hidden = device.zeros((max_rows + 1, model.hidden_size), model.dtype)
        self.last_tokens = device.zeros((max_rows + 1,), torch.int64)

    def prefill(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """tensors: as `BatchBuilder.prefill` builds them.

        Returns hidden states [B * Q, hidden_size], and bool [B]: whether those of the row's own tokens are
        all numbers. A key or value that is not shows in its token's hidden state.
        """
        tokens, positions, slots, blocks, context_lens, picks, targets = tensors
        batch = context_lens.shape[0]
        context_blocks = blocks.view(batch, blocks.shape[0] // batch)
        self.turns.forward_begins()
        hidden = self._model.prefill(tokens, positions, slots, context_blocks, context_lens)
        self.hidden.index_copy_(0, targets, hidden.index_select(0, picks))
        # Not by the maximum: whether that is NaN where one of the numbers is, a device need not say.
        harmless = hidden.isfinite().all(-1) | (slots >= self._layout.padding_start)
        return hidden, harmless.view(batch, -1).all(-1)

    def prefill_sampled(self, *tensors: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """`prefill` where nobody wants the hidden states that are returned: they may be missing."""
        select = self._model.select
        if select is None:
            return self.prefill(*tensors)
        tokens, positions, slots, blocks, context_lens, picks, targets = tensors
        batch = context_lens.shape[0]
        context_blocks = blocks.view(batch, blocks.shape[0] // batch)
        sampled = targets != self.spare_row
        self.turns.forward_begins()
        hidden, sound = select(tokens, positions, slots, context_blocks, context_lens, picks[sampled])
        self.hidden.index_copy_(0, targets[sampled], hidden)
        return None, sound.view(batch, -1).all(-1)

    def prefill_static(self, buffers: StaticBuffers) -> Callable[..., None]:
        """`prefill` for a device of static shapes: what it returns is kept in these buffers instead."""

        def run(*tensors: torch.Tensor) -> None:
            hidden, harmless = self.prefill(*tensors)
            for buffer, values in ((buffers.chunk, hidden), (buffers.harmless, harmless)):
                rows = torch.arange(values.shape[0], device=values.device)
                buffer.index_copy_(0, rows, values.to(buffer.dtype))

        return run

    def decode(self, *tensors: torch.Tensor) -> None:
        """tensors: as `BatchBuilder.decode` builds them."""
        given, positions, slots, blocks, owners, starts, last_rows, targets = tensors
        tokens = torch.where(given == PENDING, self.last_tokens.index_select(0, last_rows), given)
        self.turns.forward_begins()
        hidden = self._model.decode(tokens, positions, slots, blocks, owners, starts)
        self.hidden.index_copy_(0, targets, hidden)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> logits [R, vocab_size]."""
        return self._model.logits(hidden)

    def keep_tokens(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Makes int64 [R] tokens the last ones of these rows."""
        self.last_tokens.index_copy_(0, rows, tokens)
