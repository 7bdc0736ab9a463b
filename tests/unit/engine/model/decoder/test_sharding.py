"""What the ranks of a split compute adds up to the whole, on plain tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from torch import nn

from services.engine.device.cpu import CpuDevice
from services.engine.model import ModelError
from services.engine.model.decoder import DecoderSpec, ExpertSpec, LayerPlan, RopeSpec, Shard
from services.engine.model.decoder.layers import (
    ExpertMlp,
    GatedMlp,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from services.engine.model.loading import Slot

HIDDEN = 16
DEVICE = CpuDevice(1)
Kind = TypeVar("Kind", bound=nn.Module)
SPEC = DecoderSpec(
    family="llama",
    vocab_size=32,
    hidden_size=HIDDEN,
    intermediate_size=32,
    heads=8,
    kv_heads=2,
    head_dim=4,
    norm_eps=1e-5,
    activation="silu",
    scale=0.5,
    layers=(LayerPlan(None, 0, False),),
    ropes=(RopeSpec((1.0, 0.1), 1.0),),
    tied=False,
    mlp_bias=True,
    experts=ExpertSpec(4, 2, 32, True, False),
)


def fill(module: nn.Module, whole: nn.Module) -> None:
    """Gives a rank its share of the whole module's parameters, as the loader would."""
    sources = {name: dict(child.named_parameters(recurse=False)) for name, child in whole.named_modules()}
    for prefix, child in module.named_modules():
        for name, parts in getattr(child, "placements", dict)().items():
            experts = int(getattr(child, "experts", 0))
            slot = Slot(getattr(child, name), parts, experts)
            offset = 0
            for part in parts:
                axis = part.axis + 1 if experts else part.axis
                size = part.shape[part.axis]
                slot.place(part, sources[prefix][name].narrow(axis, offset, size), None)
                offset += size


def randomized(module: Kind) -> Kind:
    torch.manual_seed(2)
    for parameter in module.parameters():
        parameter.copy_(torch.randn_like(parameter))
    return module


def x(features: int = HIDDEN) -> torch.Tensor:
    return torch.randn((5, features), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("world", [2, 4])
def test_mlp_partials_sum_to_the_whole(world: int) -> None:
    whole = randomized(GatedMlp(SPEC, Shard()))
    total = torch.zeros(5, HIDDEN)
    for rank in range(world):
        part = GatedMlp(SPEC, Shard(rank, world))
        fill(part, whole)
        total += part(x())
    assert torch.allclose(total, whole(x()), atol=1e-3)


@pytest.mark.parametrize("world", [2, 4])
def test_expert_partials_sum_to_the_whole(world: int) -> None:
    if SPEC.experts is None:
        raise AssertionError
    whole = randomized(ExpertMlp(SPEC, SPEC.experts, Shard(), DEVICE.kernels))
    total = torch.zeros(5, HIDDEN)
    for rank in range(world):
        part = ExpertMlp(SPEC, SPEC.experts, Shard(rank, world), DEVICE.kernels)
        fill(part, whole)
        total += part(x())
    assert torch.allclose(total, whole(x()), atol=1e-3)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_column_shares_join_to_the_whole(world: int) -> None:
    whole = randomized(MergedColumnParallelLinear(HIDDEN, {"a": 8, "b": 12}, True, Shard()))
    a, b = [], []
    for rank in range(world):
        part = MergedColumnParallelLinear(HIDDEN, {"a": 8, "b": 12}, True, Shard(rank, world))
        fill(part, whole)
        out = part(x())
        a.append(out[:, : 8 // world])
        b.append(out[:, 8 // world :])
    assert torch.allclose(torch.cat([*a, *b], dim=1), whole(x()), atol=1e-4)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_ranks_share_heads_and_repeat_key_heads(world: int) -> None:
    heads, kv_heads, dim = 8, 2, 4
    whole = randomized(QKVParallelLinear(HIDDEN, heads, kv_heads, dim, True, Shard()))
    expected = whole(x()).view(5, -1, dim)
    for rank in range(world):
        part = QKVParallelLinear(HIDDEN, heads, kv_heads, dim, True, Shard(rank, world))
        fill(part, whole)
        got = part(x()).view(5, -1, dim)
        own, first = heads // world, rank * heads // world
        assert torch.allclose(got[:, :own], expected[:, first : first + own], atol=1e-4)
        # Every query head finds the key head that it has in the whole.
        for index in range(own):
            here = own + index // (own // part.kv_heads)
            there = heads + (first + index) // (heads // kv_heads)
            assert torch.allclose(got[:, here], expected[:, there], atol=1e-4)
            assert torch.allclose(got[:, here + part.kv_heads], expected[:, there + kv_heads], atol=1e-4)


def test_the_shard_reduces_row_parallel_results() -> None:
    layer = randomized(RowParallelLinear(HIDDEN, 8, True, Shard(0, 2, lambda partial: partial * 10)))
    plain = torch.nn.functional.linear(x(8), layer.weight, layer.bias)
    assert torch.equal(layer(x(8)), plain * 10)
    assert RowParallelLinear(HIDDEN, 8, True, Shard(1, 2)).bias is None


def test_uneven_splits_are_refused() -> None:
    with pytest.raises(ModelError, match=r"size of whole \(10\) cannot be split over 4 ranks"):
        MergedColumnParallelLinear(HIDDEN, {"whole": 10}, False, Shard(0, 4))
    with pytest.raises(ModelError, match="number of ranks"):
        QKVParallelLinear(HIDDEN, 6, 2, 4, False, Shard(0, 3))
    with pytest.raises(ModelError, match="size of an expert"):
        ExpertMlp(
            SPEC,
            replace(SPEC.experts or ExpertSpec(1, 1, 1, True, True), intermediate_size=30),
            Shard(0, 4),
            DEVICE.kernels,
        )
