"""What the static computations of a step's sampling read and leave for one another."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from catenary.schema import MAX_TOP_LOGPROBS
from services.engine.device import Device
from services.engine.sampling.rows import PACKED_HEAD


@dataclass(frozen=True, slots=True)
class StaticSizes:
    """Most rows that are sampled, most rows and tokens of a prefill, most prompt tokens scored at once."""

    rows: int
    prefill_rows: int
    prefill_tokens: int
    slice_rows: int


@dataclass(frozen=True, slots=True)
class StaticBuffers:
    """Tensors that live as long as the engine. The last of S = rows + 1 rows takes what belongs to nobody.

    raw, scores float32 [S, V]: logits before and after edits. tokens int64 [S]: drawn, then sampled ones.
    head [S, 2]: token and status; columns [S, 1 + 2 * n]: log probabilities; harmless [prefill rows]: whether
    a prefill's row went well; these and what follows are of the device's widest float. results: all of them
    in one row, once for each of the steps that may be in flight, and so prompts [tokens + 1, 1 + 2 * n].
    chunk [prefill tokens, hidden_size]: hidden states of the last prefill.
    """

    raw: torch.Tensor
    scores: torch.Tensor
    tokens: torch.Tensor
    head: torch.Tensor
    columns: torch.Tensor
    harmless: torch.Tensor
    chunk: torch.Tensor
    results: tuple[torch.Tensor, torch.Tensor]
    prompts: tuple[torch.Tensor, torch.Tensor]

    @property
    def bytes(self) -> int:
        """What they take of the device's memory."""
        total = 0
        for one in fields(self):
            value = getattr(self, one.name)
            total += sum(tensor.nbytes for tensor in (value if isinstance(value, tuple) else (value,)))
        return total

    def unpack(self, host: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of one of `results` on the host: `harmless`, and packed samples [S, 3 + 2 * n]."""
        harmless = self.harmless.shape[0]
        return host[:harmless], host[harmless:].view(self.raw.shape[0], -1)


def allocate(
    device: Device, sizes: StaticSizes, vocab_size: int, hidden_size: int, dtype: torch.dtype
) -> StaticBuffers:
    """Zeroed buffers for a model whose hidden states are of `dtype`."""
    rows, wide = sizes.rows + 1, device.wide_dtype
    width = PACKED_HEAD + 2 * min(MAX_TOP_LOGPROBS, vocab_size)
    slices = -(-sizes.prefill_tokens // sizes.slice_rows)

    def twice(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        return device.zeros(shape, wide), device.zeros(shape, wide)

    return StaticBuffers(
        raw=device.zeros((rows, vocab_size), torch.float32),
        scores=device.zeros((rows, vocab_size), torch.float32),
        tokens=device.zeros((rows,), torch.int64),
        head=device.zeros((rows, PACKED_HEAD - 1), wide),
        columns=device.zeros((rows, width - PACKED_HEAD + 1), wide),
        harmless=device.zeros((sizes.prefill_rows,), wide),
        chunk=device.zeros((sizes.prefill_tokens, hidden_size), dtype),
        results=twice((sizes.prefill_rows + rows * width,)),
        prompts=twice((slices * sizes.slice_rows + 1, width - PACKED_HEAD + 1)),
    )
