"""Splits a causal language model of transformers into its body and what it does to hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast


@dataclass
class BodyOutput(MoeModelOutputWithPast):
    """What heads read of a body's output, or pass on. All but the hidden states is None."""

    cross_attentions: tuple[torch.Tensor, ...] | None = None


class HiddenStates(nn.Module):
    """Stands in for a model's body: it returns the hidden states that it is given as embeddings.

    So a causal model's own forward, with this in its body's place, is its head: the projection and whatever
    else the architecture does to the logits.
    """

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> BodyOutput:
        """inputs_embeds [1, R, H] is the body's last hidden state. Everything else is ignored."""
        return BodyOutput(last_hidden_state=inputs_embeds)


def take_body(model: Any) -> Any:
    """Takes the decoder stack out of `model`, which becomes its head. Returns the stack."""
    body = model.get_decoder()
    path = next(name for name, module in model.named_modules() if module is body)
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, HiddenStates())
    return body


def head_logits(head: Any, hidden: torch.Tensor) -> torch.Tensor:
    """hidden [R, H] -> logits [R, vocab] by a model whose body was taken."""
    logits: torch.Tensor = head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
    return logits[0]
