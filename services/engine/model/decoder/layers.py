"""The layers of our decoder: linears, norms, rotary embedding, attention, MLP, experts.

Column-parallel ones split what they give, row-parallel ones what they take; a rank's partial results are
summed by the shard. Their class names are those by which quantizers of the vendors know such layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn
from torch.nn.functional import linear

from services.engine.device import ACTIVATIONS, NO_FEATURES, AttentionFeatures, Kernels
from services.engine.model.decoder.spec import DecoderSpec, ExpertSpec, LayerPlan, RopeSpec, Shard
from services.engine.model.loading import Part
from services.engine.model.paged import DecodeInputs, LayerCache, LayerSpec, PrefillInputs, attend


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
    """Return parts of a fused weight and bias. shares: name -> (whole size, start, length) of outputs."""
    weight: list[Part] = []
    bias: list[Part] = []
    offset = 0
    for name, (size, start, length) in shares.items():
        weight.append(Part(name, (size, in_features), 0, start, length, offset))
        bias.append(Part(name, (size,), 0, start, length, offset))
        offset += length
    return {"weight": tuple(weight), "bias": tuple(bias)}


class RmsNorm(nn.Module):
    """A norm with the weight of a checkpoint, as `Kernels.rms_norm` describes it."""

    def __init__(
        self,
        size: int,
        eps: float,
        kernels: Kernels,
        *,
        unit_offset: bool = False,
        residual_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self._kernels = kernels
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self._eps = eps
        self._unit_offset = unit_offset
        self._multiplier = residual_multiplier

    def placements(self) -> Mapping[str, tuple[Part, ...]]:
        """The checkpoint tensors that each parameter is made of."""
        return {"weight": (Part.whole(tuple(self.weight.shape)),)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        return self._kernels.rms_norm(x, self.weight, self._eps, unit_offset=self._unit_offset)

    def wide_weight(self) -> torch.Tensor:
        """Return the scale of normed numbers, float32 [size], the offset of one added."""
        return self.weight.data.float() + (1.0 if self._unit_offset else 0.0)

    def fused(self, delta: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `delta` to the residual stream and norms the sum: [T, size] x2 -> (normed, residual)."""
        if self._multiplier != 1.0:
            delta = delta * self._multiplier
        residual = residual + delta
        return self.forward(residual), residual


class Rotary(nn.Module):
    """Cosines and sines of one rotary embedding; the layers that share it get what one forward computed."""

    frequencies: torch.Tensor

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        super().__init__()
        # float32 whatever the model's type: positions of a long context need it.
        wide = torch.tensor(spec.frequencies, dtype=torch.float32, device=device)
        self.register_buffer("frequencies", wide, persistent=False)
        self._factor = spec.factor

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] -> (cos, sin), each [T, 1, rotated dimensions] in `dtype`."""
        angles = positions.unsqueeze(1).float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        return (angles.cos() * self._factor).to(dtype), (angles.sin() * self._factor).to(dtype)


BatchInputs = PrefillInputs | DecodeInputs


class DecoderAttention(nn.Module):
    """Query, key and value by one product, rotated, attended and joined.

    `cache` is set before the first forward. It hangs on the module, since an index into a list of caches
    would make each layer's compiled code its own.
    """

    cache: LayerCache

    def __init__(self, spec: DecoderSpec, plan: LayerPlan, shard: Shard, kernels: Kernels) -> None:
        super().__init__()
        self._kernels = kernels
        self.qkv = QKVParallelLinear(
            spec.hidden_size, spec.heads, spec.kv_heads, spec.head_dim, spec.qkv_bias, shard
        )
        self.output = RowParallelLinear(spec.heads * spec.head_dim, spec.hidden_size, spec.output_bias, shard)
        norms = [
            RmsNorm(spec.head_dim, spec.norm_eps, kernels, unit_offset=spec.unit_offset_norm)
            if spec.qk_norm
            else None
            for _ in range(2)
        ]
        self.query_norm, self.key_norm = norms
        self._heads, self._kv_heads = self.qkv.heads, self.qkv.kv_heads
        self._head_dim = spec.head_dim
        self._window = plan.window
        self._scale = spec.scale
        self._features = (
            AttentionFeatures(softcap=spec.attention_softcap) if spec.attention_softcap else NO_FEATURES
        )

    def layer_spec(self) -> LayerSpec:
        """Shape of this rank's KV."""
        return LayerSpec(self._kv_heads, self._head_dim, self._head_dim, self._window)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inputs: BatchInputs
    ) -> torch.Tensor:
        """x [T, hidden], cos and sin [T, 1, rotated] -> [T, hidden]."""
        heads, kv_heads = self._heads, self._kv_heads
        fused = self.qkv(x).view(-1, heads + 2 * kv_heads, self._head_dim)
        query_key, value = fused[:, : heads + kv_heads], fused[:, heads + kv_heads :]
        if self.query_norm is not None and self.key_norm is not None:
            normed = (self.query_norm(query_key[:, :heads]), self.key_norm(query_key[:, heads:]))
            query_key = torch.cat(normed, dim=1)
        query_key = self._kernels.rotate(query_key, cos, sin)
        mixed = attend(
            self.cache,
            query_key[:, :heads],
            query_key[:, heads:],
            value,
            inputs,
            window=self._window,
            scale=self._scale,
            features=self._features,
        )
        result: torch.Tensor = self.output(mixed.flatten(1))
        return result


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, spec: DecoderSpec, shard: Shard) -> None:
        super().__init__()
        size = spec.intermediate_size
        self.gate_up = MergedColumnParallelLinear(
            spec.hidden_size, {"gate": size, "up": size}, spec.mlp_bias, shard
        )
        self.down = RowParallelLinear(size, spec.hidden_size, spec.mlp_bias, shard)
        self._activation = ACTIVATIONS[spec.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        result: torch.Tensor = self.down(self._activation(gate) * up)
        return result


class Router(nn.Module):
    """Chooses experts for each token by the softmax of one product."""

    def __init__(self, hidden_size: int, spec: ExpertSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.count, hidden_size), requires_grad=False)
        self._per_token = spec.per_token
        self._normalize = spec.normalize
        self._rounded = spec.rounded

    def placements(self) -> Mapping[str, tuple[Part, ...]]:
        """The checkpoint tensors that each parameter is made of."""
        return {"weight": (Part.whole(tuple(self.weight.shape)),)}

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] -> (weights [T, k], expert ids int64 [T, k])."""
        probabilities = torch.softmax(linear(x, self.weight), dim=-1, dtype=torch.float32)
        weights, ids = torch.topk(probabilities, self._per_token, dim=-1)
        if self._normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return (weights.to(x.dtype) if self._rounded else weights), ids


class Experts(nn.Module):
    """The experts' weights, stacked: gate_up [experts, 2 * size, hidden], down [experts, hidden, size].

    Every rank has a share of each expert.
    """

    def __init__(self, spec: DecoderSpec, experts: ExpertSpec, shard: Shard, kernels: Kernels) -> None:
        super().__init__()
        hidden, size, self.experts = spec.hidden_size, experts.intermediate_size, experts.count
        start, own = shard.split(size, "size of an expert")
        self.gate_up = nn.Parameter(torch.empty(self.experts, 2 * own, hidden), requires_grad=False)
        self.down = nn.Parameter(torch.empty(self.experts, hidden, own), requires_grad=False)
        self._parts = {
            "gate_up": (
                Part("gate", (size, hidden), 0, start, own, 0),
                Part("up", (size, hidden), 0, start, own, own),
            ),
            "down": (Part("whole", (hidden, size), 1, start, own, 0),),
        }
        self._activation = spec.activation
        self._kernels = kernels
        self._reduce = shard.reduce

    def placements(self) -> Mapping[str, tuple[Part, ...]]:
        """The checkpoint tensors that one expert's parameters are made of."""
        return self._parts

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], weights and ids [T, k] -> [T, hidden]."""
        own = self._kernels.experts(x, weights, ids, self.gate_up, self.down, self._activation)
        return self._reduce(own)


class ExpertMlp(nn.Module):
    """Router and experts in the place of an MLP."""

    def __init__(self, spec: DecoderSpec, experts: ExpertSpec, shard: Shard, kernels: Kernels) -> None:
        super().__init__()
        self.router = Router(spec.hidden_size, experts)
        self.experts = Experts(spec, experts, shard, kernels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        weights, ids = self.router(x)
        result: torch.Tensor = self.experts(x, weights, ids)
        return result


class DecoderLayer(nn.Module):
    """Attention and MLP (or experts), each after a norm that is fused with the residual addition before it.

    It returns the residual stream and what is still to be added to it, so that the next norm adds it.
    Nothing in it depends on which layer it is: layers of the same plan share compiled code.
    """

    def __init__(self, spec: DecoderSpec, plan: LayerPlan, shard: Shard, kernels: Kernels) -> None:
        super().__init__()
        norm = partial(RmsNorm, spec.hidden_size, spec.norm_eps, kernels, unit_offset=spec.unit_offset_norm)
        self.attention_norm = norm(residual_multiplier=spec.residual_multiplier)
        self.attention = DecoderAttention(spec, plan, shard, kernels)
        self.attention_post_norm = norm() if spec.sandwich_norms else None
        self.mlp_norm = norm(residual_multiplier=spec.residual_multiplier)
        self.mlp: GatedMlp | ExpertMlp = (
            ExpertMlp(spec, spec.experts, shard, kernels)
            if plan.experts and spec.experts
            else GatedMlp(spec, shard)
        )
        self.mlp_post_norm = norm() if spec.sandwich_norms else None

    def forward(
        self,
        delta: torch.Tensor,
        residual: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        inputs: BatchInputs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """delta, residual [T, hidden]; cos, sin [T, 1, rotated] -> (delta, residual)."""
        normed, residual = self.attention_norm.fused(delta, residual)
        delta = self.attention(normed, cos, sin, inputs)
        if self.attention_post_norm is not None:
            delta = self.attention_post_norm(delta)
        normed, residual = self.mlp_norm.fused(delta, residual)
        delta = self.mlp(normed)
        if self.mlp_post_norm is not None:
            delta = self.mlp_post_norm(delta)
        return delta, residual
