"""Log probabilities of the model's own distribution."""

from __future__ import annotations

import torch

from catenary.schema import MAX_TOP_LOGPROBS
from services.engine.device import Device
from services.engine.sampling.rows import best


def logprob_columns(
    logits: torch.Tensor, tokens: torch.Tensor, alternatives: bool, device: Device
) -> torch.Tensor:
    """logits float32 [A, V], tokens int64 [A] -> [A, 1 + 2 * n]: log probability, n best ids, their values.

    n is MAX_TOP_LOGPROBS (or V) or 0, whatever number a row asks for, so that ties are broken alike whoever
    is in the batch.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(1, tokens.unsqueeze(1)).to(device.wide_dtype)
    if not alternatives:
        return own
    values, ids = logprobs.topk(min(MAX_TOP_LOGPROBS, logits.shape[1]), dim=-1)
    return torch.cat((own, ids.to(device.wide_dtype), values.to(device.wide_dtype)), dim=1)


def beam_columns(scores: torch.Tensor, device: Device) -> torch.Tensor:
    """scores float32 [B, V], adjusted log probabilities -> [B, 1 + 2 * n] as `logprob_columns` gives them.

    The first column is that of the best token.
    """
    values, ids = scores.topk(min(MAX_TOP_LOGPROBS, scores.shape[1]), dim=-1)
    columns = (values[:, :1], ids.to(device.wide_dtype), values)
    return torch.cat([column.to(device.wide_dtype) for column in columns], dim=1)


def prompt_logprobs(logits: torch.Tensor, targets: torch.Tensor, top_n: int, device: Device) -> torch.Tensor:
    """Log probabilities of prompt tokens, for `unpack_prompt`: logits [R, V] of the tokens before them,
    targets int64 [R] the tokens themselves, `top_n` the most alternatives that any row asks for."""
    return logprob_columns(logits.float(), targets, top_n > 0, device)


def unpack_prompt(host: torch.Tensor, top_n: int) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Reads rows of `prompt_logprobs` on the host: each token's log probability and its `top_n` alternatives.

    A value is NaN if the row's logits were not finite.
    """
    width = (host.shape[1] - 1) // 2
    return [(values[0], best(values[1:], width, top_n)) for values in host.tolist()]
