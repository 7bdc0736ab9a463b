"""Attention on the simulated HPU, fused and plain, equals plain attention over each sequence alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.engine.device import AttentionFeatures, sim
from services.engine.device.hpu import AttentionSettings, HpuDevice
from services.engine.device.hpu.attention import softmax_mode
from services.engine.device.hpu.settings import Softmax
from services.engine.device.sim.fused.kernels import NOISE
from tests.sim.conftest import NewCard
from tests.support.hpu_devices import CHOICES, open_choice
from tests.support.paged_sequences import SCALE, Heads, Sequences

ALL = ("softcap", "sinks", "alibi")
FEATURES: dict[str, tuple[str, ...]] = {"none": (), **{name: (name,) for name in ALL}, "all": ALL}
LENGTHS = [1, 5, 12, 23]
PLAIN = AttentionFeatures()


@pytest.fixture(autouse=True)
def _inference(new_card: NewCard) -> Iterator[None]:
    new_card()
    with torch.inference_mode():
        yield


def _close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("choice", "name"), list(itertools.product(CHOICES, FEATURES)))
def test_chunks_and_decodes_equal_plain_attention(choice: str, name: str) -> None:
    device = open_choice(choice)
    for heads, window in ((Heads(), None), (Heads(value_dim=3), 5)):
        features = heads.features(*FEATURES[name])
        batch = Sequences(LENGTHS, heads, device)
        chunks = [
            ((0, 0, 0, 0), batch.prefill([0, 0, 0, 0], 6, 0, features, window)),
            ((0, 0, 6, 6), batch.prefill([0, 0, 6, 6], 8, 2, features, window)),
            ((0, 0, 7, 14), batch.prefill([0, 0, 7, 14], 12, 5, features, window)),
        ]
        decoded = batch.decode(features, window)
        slice_ = batch.decode(features, window, contiguous=True)
        for row, length in enumerate(LENGTHS):
            expected = batch.expected(row, features, window)
            for starts, out in chunks:
                start = starts[row]
                count = min(length - start, out.shape[1])
                _close(out[row, :count], expected[start : start + count])
            _close(decoded[row], expected[-1])
            _close(slice_[row], expected[-1])


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
    "heads",
    [
        Heads(1, 1, 64, 64, block=1),
        Heads(4, 4, 80, 80, block=16),
        Heads(8, 1, 128, 128, block=128),
        Heads(8, 2, 256, 256, block=128),
        Heads(4, 2, 192, 128, block=32),
    ],
    ids=str,
)
def test_head_and_block_sizes(choice: str, heads: Heads) -> None:
    """One token alone, the last token of a block, the first one of the next."""
    block, features = heads.block, AttentionFeatures()
    batch = Sequences([1, block, block + 1], heads, open_choice(choice))
    whole = batch.prefill([0, 0, 0], block + 1, 0, features, None)
    decoded = batch.decode(features, None, padded=1)
    for row, length in enumerate(batch.lengths):
        expected = batch.expected(row, features, None)
        _close(whole[row, :length], expected, 1e-4)
        _close(decoded[row], expected[-1], 1e-4)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_row_does_not_depend_on_its_neighbours(choice: str) -> None:
    batch = Sequences([9, 17], Heads(), open_choice(choice))
    features = AttentionFeatures()
    whole = batch.prefill([0, 0], 20, 0, features, None)
    decoded = batch.decode(features, None)
    batch.query[9:] *= 50
    batch.key[9:] *= 50
    batch.value[9:] *= 50
    changed = batch.prefill([0, 0], 20, 0, features, None)
    torch.testing.assert_close(changed[0, :9], whole[0, :9], atol=0, rtol=0)
    torch.testing.assert_close(batch.decode(features, None)[0], decoded[0], atol=0, rtol=0)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("spoiled", ["query", "key", "value"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_no_number_stays_in_its_row(choice: str, spoiled: str, number: float) -> None:
    batch = Sequences([9, 17], Heads(), open_choice(choice))
    features = AttentionFeatures()
    batch.prefill([0, 0], 17, 0, features, None)
    # The last token of the second sequence: the decode writes it, or asks with it.
    getattr(batch, spoiled)[-1] = number
    for contiguous in (False, True):
        out = batch.decode(features, None, contiguous=contiguous)
        _close(out[0], batch.expected(0, features, None)[-1])
        assert not out[1].isfinite().all()


@pytest.mark.parametrize("choice", CHOICES)
def test_blocks_of_nobody_may_hold_anything(choice: str) -> None:
    batch = Sequences([9, 17], Heads(), open_choice(choice))
    features = AttentionFeatures()
    batch.prefill([0, 0], 17, 0, features, None)
    used = {id_ for table in batch.tables for id_ in table}
    free = torch.tensor([id_ for id_ in range(batch.blocks) if id_ not in used])
    for cache in (batch.layer.key, batch.layer.value):
        paged = cache.view(-1, batch.heads.block, *cache.shape[1:])
        paged.index_fill_(0, free.to("hpu"), torch.nan)
    out = batch.decode(features, None, contiguous=True)
    for row in range(2):
        _close(out[row], batch.expected(row, features, None)[-1])


@pytest.mark.parametrize(
    ("choice", "name", "window"), list(itertools.product(CHOICES, ("none", "all"), (None, 5)))
)
def test_bfloat16(choice: str, name: str, window: int | None) -> None:
    """With a window, blocks of which nothing is seen: no rounding makes anything of them."""
    heads = Heads(value_dim=3)
    features = heads.features(*FEATURES[name])
    batch = Sequences([23, 5], heads, open_choice(choice), torch.bfloat16)
    first = batch.prefill([0, 0], 23, 0, features, window)
    second = batch.prefill([14, 4], 12, 4, features, window)
    decoded = batch.decode(features, window)
    for row, length in enumerate(batch.lengths):
        expected = batch.expected(row, features, window)[-1]
        _close(first[row, length - 1], expected, 0.03)
        _close(second[row, length - 1 - (14, 4)[row]], expected, 0.03)
        _close(decoded[row], expected, 0.03)


def test_padded_queries_are_skipped_where_nothing_masks_them() -> None:
    batch = Sequences([3, 9], Heads(), open_choice("default"))
    out = batch.prefill([0, 0], 16, 0, AttentionFeatures(), None)
    assert (out[0, 3:] == NOISE).all()
    assert (out[1, 9:] == NOISE).all()
    assert not (out[1, :9] == NOISE).any()


def test_a_padded_row_has_one_token_of_its_own() -> None:
    """Its length is 0, and nothing divided by nothing would be no number."""
    device = open_choice("default")
    x = torch.randn(2, 2, 4, 8)
    there, lengths = x.to("hpu"), torch.tensor([4, 0]).to("hpu")
    out = device.kernels.attend_prefill(there, there, there, None, 0.3, AttentionFeatures(), lengths).cpu()
    torch.testing.assert_close(out[1, :, 0], x[1, :, 0])


@pytest.mark.parametrize("choice", CHOICES)
def test_nothing_is_read_by_the_host_and_nothing_runs_on_it(choice: str) -> None:
    device = open_choice(choice)
    for name in FEATURES:
        batch = Sequences(LENGTHS, Heads(), device)
        features = batch.heads.features(*FEATURES[name])
        before = _counted(device)
        batch.prefill([0, 0, 6, 6], 8, 2, features, 5)
        batch.decode(features, 5)
        # Two results are read.
        assert _counted(device) == (before[0] + 2, before[1])


def _counted(device: HpuDevice) -> tuple[int, int]:
    return sim.card().counters.host_reads, device.execution.counters()["cpu_fallbacks"]


def test_the_modes_of_softmax() -> None:
    """Float32 inside of the kernel is for bfloat16 alone; other types have the kernel's own way."""
    assert softmax_mode(AttentionSettings(), torch.bfloat16) == "fast"
    assert softmax_mode(AttentionSettings(softmax=Softmax.FP32), torch.bfloat16) == "fp32"
    assert softmax_mode(AttentionSettings(softmax=Softmax.FP32), torch.float32) == "None"


class Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Elements of each tensor that is cast from bfloat16 to float32."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        changed = [getattr(tensor, "dtype", None) for tensor in (*args[:1], result)]
        if changed == [torch.bfloat16, torch.float32]:
            self.sizes.append(result.numel())
        return result


def _large_scores(offset: float) -> Sequences:
    """Sequences whose keys have a large part in common, as Qwen2's biases of keys give them."""
    batch = Sequences(
        [300, 129, 700], Heads(8, 2, 128, 128, block=128), open_choice("default"), torch.bfloat16
    )
    common = torch.zeros(128)
    common[:4] = offset
    batch.query = (batch.query.float() + common).bfloat16()
    batch.key = (batch.key.float() * 0.3 + common).bfloat16()
    return batch


@pytest.mark.parametrize("heads", [Heads(), Heads(4, 4, 16, 16), Heads(4, 1, 16, 16)], ids=str)
def test_the_kernel_of_slices_gets_rows_that_follow_one_another(heads: Heads) -> None:
    """A slice of a longer row is a view with gaps: the plugin copies it before the kernel reads it."""
    device = open_choice("sliced")
    kernel, calls = device.kernels.fused.sliced_sdpa, []

    def recorded(*arguments: Any) -> Any:
        calls.append([a.is_contiguous() for a in arguments if isinstance(a, torch.Tensor)])
        return kernel(*arguments)

    device.kernels.use(replace(device.kernels.fused, sliced_sdpa=recorded), device.kernels.settings)
    batch = Sequences([23, 23], heads, device)
    batch.prefill([0, 0], 7, 0, PLAIN, None)
    batch.prefill([7, 7], 16, 4, PLAIN, None)
    assert len(calls) > 3
    assert calls == [[True] * 4] * len(calls)


@pytest.mark.parametrize(("offset", "largest"), [(7.0, 68.0), (30.0, 1111.0)])
def test_large_scores_keep_their_differences_in_float32(offset: float, largest: float) -> None:
    """bfloat16 tells numbers beyond 64 apart by halves, beyond 1024 by eights: softmax weights are wrong by
    their exponentials."""
    errors: dict[str, float] = {}
    for family in ("llama", "qwen2"):
        batch = _large_scores(offset)
        batch.device.kernels.adapt({"model_type": family})
        for first in range(0, 700, 350):
            batch.prefill(
                [min(first, length) for length in batch.lengths], 350, -(-first // 128), PLAIN, None
            )
        found = batch.decode(PLAIN, None).double()
        expected = torch.stack([batch.expected(row, PLAIN, None)[-1] for row in range(3)])
        scores = batch.query[-1, 0].double() @ batch.key[-700:, 0].double().t() * SCALE
        assert scores.abs().max() > largest * 0.8
        errors[family] = float((found - expected).norm() / expected.norm())
    # Rounding the result alone to bfloat16 makes 0.0017.
    assert errors["qwen2"] <= 0.003
    assert errors["llama"] > 0.01


def test_scores_in_float32_cast_the_keys_that_a_decode_reads_and_no_values() -> None:
    """A cast costs five times the bytes of what is cast: neither values nor the rest of a cache are."""
    device = open_choice("default")
    device.kernels.adapt({"model_type": "qwen2"})
    batch = Sequences([40, 170], Heads(8, 2, 128, 128, block=128), device, torch.bfloat16)
    batch.prefill([0, 0], 170, 0, PLAIN, None)
    with Casts() as casts:
        batch.decode(PLAIN, None, padded=0)
    blocks, kv_heads, block_size, dim = 3, 2, 128, 128
    assert batch.blocks > blocks
    assert [count for count in casts.sizes if count >= block_size * dim] == [
        blocks * kv_heads * block_size * dim
    ]


@pytest.mark.parametrize("starts", [[0, 0], [0, 128]])
def test_prompts_of_the_family_have_a_softmax_in_float32(starts: list[int]) -> None:
    device = open_choice("default")
    device.kernels.adapt({"model_type": "qwen2"})
    assert softmax_mode(device.kernels.settings.attention, torch.bfloat16) == "fp32"
    batch = Sequences([40, 170], Heads(8, 2, 128, 128, block=128), device, torch.bfloat16)
    batch.prefill([0, 0], 170, 0, PLAIN, None)
    out = batch.prefill(starts, 170, 1, PLAIN, None)
    for row, start in enumerate(starts):
        expected = batch.expected(row, PLAIN, None)
        _close(out[row, : batch.lengths[row] - start], expected[start:], 0.02)
