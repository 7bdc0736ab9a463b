"""Linear layers with fused weights, each holding one rank's share.

Column-parallel ones split what they give, row-parallel ones what they take; a rank's partial results are
summed by the shard. Their class names are those by which quantizers of the vendors know such layers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.functional import linear

from services.engine.model.decoder.shard import Shard
from services.engine.model.loading import Part


class ShardedLinear(nn.Module):
    """A weight [out, in] and a bias [out] or None, this rank's share of them. `parts` says what they hold."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, parts: Mapping[str, tuple[Part, ...]]
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self._parts = parts

    def placements(self) -> Mapping[str, tuple[Part, ...]]:
        """The checkpoint tensors that each parameter is made of."""
        return self._parts if self.bias is not None else {"weight": self._parts["weight"]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        return linear(x, self.weight, self.bias)


class MergedColumnParallelLinear(ShardedLinear):
    """Several column-parallel layers of the same input in one product: `outputs` names them, in order."""

    def __init__(self, in_features: int, outputs: Mapping[str, int], bias: bool, shard: Shard) -> None:
        shares = {name: (size, *shard.split(size, f"size of {name}")) for name, size in outputs.items()}
        super().__init__(
            in_features, sum(share[2] for share in shares.values()), bias, column_parts(in_features, shares)
        )


class ColumnParallelLinear(MergedColumnParallelLinear):
    """A layer whose outputs the ranks share."""

    def __init__(self, in_features: int, out_features: int, bias: bool, shard: Shard) -> None:
        super().__init__(in_features, {"whole": out_features}, bias, shard)


class QKVParallelLinear(ShardedLinear):
    """Query, key and value in one product; ranks share heads. Several have a key head where there are few."""

    def __init__(
        self, in_features: int, heads: int, kv_heads: int, head_dim: int, bias: bool, shard: Shard
    ) -> None:
        start, own_heads = shard.split(heads, "number of attention heads")
        kv_start, own_kv = kv_share(kv_heads, shard)
        self.heads, self.kv_heads = own_heads, own_kv
        shares = {
            "q": (heads * head_dim, start * head_dim, own_heads * head_dim),
            "k": (kv_heads * head_dim, kv_start * head_dim, own_kv * head_dim),
            "v": (kv_heads * head_dim, kv_start * head_dim, own_kv * head_dim),
        }
        super().__init__(
            in_features, (own_heads + 2 * own_kv) * head_dim, bias, column_parts(in_features, shares)
        )


class RowParallelLinear(ShardedLinear):
    """A layer whose inputs the ranks share. The bias is the first rank's alone, so that it is added once."""

    def __init__(self, in_features: int, out_features: int, bias: bool, shard: Shard) -> None:
        start, length = shard.split(in_features, "input size")
        weight = Part("whole", (out_features, in_features), 1, start, length, 0)
        kept = bias and shard.rank == 0
        parts = {"weight": (weight,), "bias": (Part.whole((out_features,)),)}
        super().__init__(length, out_features, kept, parts)
        self._reduce = shard.reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's [..., in / world] -> the sum of all ranks, [..., out]."""
        return self._reduce(super().forward(x))


def kv_share(kv_heads: int, shard: Shard) -> tuple[int, int]:
    """(first, count) of this rank's key heads: several ranks share one where there are fewer than ranks."""
    if kv_heads >= shard.world:
        return shard.split(kv_heads, "number of key heads")
    _, ranks_per_head = Shard(0, kv_heads).split(shard.world, "number of ranks")
    return shard.rank // ranks_per_head, 1


def column_parts(
    in_features: int, shares: Mapping[str, tuple[int, int, int]]
) -> Mapping[str, tuple[Part, ...]]:
    """Parts of a fused weight and bias. shares: name -> (whole size, start, length) along the outputs."""
    weight: list[Part] = []
    bias: list[Part] = []
    offset = 0
    for name, (size, start, length) in shares.items():
        weight.append(Part(name, (size, in_features), 0, start, length, offset))
        bias.append(Part(name, (size,), 0, start, length, offset))
        offset += length
    return {"weight": tuple(weight), "bias": tuple(bias)}
