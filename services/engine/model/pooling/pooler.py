"""What an embedder drives: a model that turns padded documents into one vector each, or logits of classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import nn

from services.engine.model.pooling.settings import Activation, Pooling


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
