"""The generators' lists; row numbers are those of the facts sheet on Gaudi, section 1.6."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.bucketing import (
    BucketLimits,
    Exponential,
    ExponentialRange,
    Linear,
    LinearRange,
    Padding,
    PaddingOptions,
    PaddingRange,
    decode_grid,
    fit_to_pool,
    prefill_grid,
)

QWEN = BucketLimits(
    block_size=128, max_model_len=91964, max_num_seqs=256, max_num_batched_tokens=2048, num_blocks=3593
)


@pytest.mark.parametrize(
    ("minimum", "step", "maximum", "expected"),
    [
        pytest.param(2, 64, 128, "2 4 8 16 32 64 128", id="row 1"),
        pytest.param(1, 64, 128, "1 2 4 8 16 32 64 128", id="row 2"),
        pytest.param(2, 32, 64, "2 4 8 16 32 64", id="row 3"),
        pytest.param(128, 128, 512, "128 256 384 512", id="row 4a"),
        pytest.param(1, 32, 48, "1 2 4 8 16 32", id="row 4b: 48 is lost"),
        pytest.param(3, 8, 24, "3 6 8 16 24", id="row 4c"),
        pytest.param(0, 1, 4, "0 1 2 3 4", id="row 4d"),
        pytest.param(0, 4, 0, "0", id="nothing but 0"),
        pytest.param(20, 8, 40, "24 32 40", id="a minimum over the step"),
        pytest.param(1, 32, 3, "1 2", id="a maximum under the step"),
    ],
)
def test_linear_lists(minimum: int, step: int, maximum: int, expected: str) -> None:
    assert LinearRange(minimum, step, maximum).values() == [int(value) for value in expected.split()]


@pytest.mark.parametrize(
    ("minimum", "step", "maximum", "limit", "contiguous", "expected"),
    [
        pytest.param(128, 128, 2048, 10, False, "128 256 384 512 640 896 1152 1536 2048", id="row 5"),
        pytest.param(1, 2, 256, 9, False, "1 2 4 8 14 24 42 78 140 256", id="row 6"),
        pytest.param(128, 128, 2048, 11, False, "128 256 384 512 768 896 1280 1664 2048", id="row 7"),
        pytest.param(
            128,
            128,
            8192,
            13,
            False,
            "128 256 384 512 768 1024 1536 2048 2944 4096 5888 8192",
            id="row 8, whose hand-run rounded 4096 up",
        ),
        pytest.param(0, 1, 702, 11, False, "0 1 2 4 8 14 27 52 99 190 365 702", id="row 9"),
        pytest.param(
            1,
            256,
            10779,
            15,
            False,
            "1 256 512 768 1024 1280 1792 2304 3072 3840 4864 6400 8448 10779",
            id="row 10",
        ),
        pytest.param(1, 256, 3593, 13, True, "1 256 512 768 1024 1280 1536 2048 2560 3072 3593", id="row 11"),
        pytest.param(1, 2, 1, 1, False, "1", id="a limit of one"),
        pytest.param(0, 1, 1, 2, False, "0 1", id="a maximum of one"),
        pytest.param(1, 256, 100, 8, False, "1 100", id="a step over the maximum"),
    ],
)
def test_exponential_lists(
    minimum: int, step: int, maximum: int, limit: int, contiguous: bool, expected: str
) -> None:
    values = ExponentialRange(minimum, step, maximum, limit, ends_exactly=contiguous).values()
    assert values == [int(value) for value in expected.split()]


@pytest.mark.parametrize(
    ("minimum", "step", "maximum", "limit", "contiguous", "expected"),
    [
        pytest.param(1, 32, 1024, 11, False, "1 32 64 96 128 192 288 384 544 736 1024", id="256 becomes 288"),
        pytest.param(1, 32, 1024, 11, True, "1 32 64 96 128 192 288 384 544 736 1024", id="contiguous"),
        pytest.param(
            1,
            64,
            4096,
            13,
            False,
            "1 64 128 192 256 384 512 768 1024 1472 2048 2944 4096",
            id="2048 stays",
        ),
        pytest.param(0, 1, 32, 6, False, "0 1 2 4 9 17 32", id="8 and 16 become 9 and 17"),
        pytest.param(0, 1, 64, 7, False, "0 1 2 4 8 16 32 64", id="all powers stay"),
        pytest.param(0, 1, 1024, 11, False, "0 1 2 4 9 17 32 65 129 257 513 1024", id="most become one more"),
        pytest.param(0, 1, 2048, 12, False, "0 1 2 4 8 16 33 64 128 257 513 1025 2048", id="some do"),
        pytest.param(1, 8, 256, 6, False, "1 8 16 32 72 136 256", id="128 becomes 136"),
    ],
)
def test_exponential_lists_round_exact_powers_as_the_published_rule_does(
    minimum: int, step: int, maximum: int, limit: int, contiguous: bool, expected: str
) -> None:
    """The exponent is i times 1 / (limit - 1): a float that is, or is not, a last bit too large."""
    values = ExponentialRange(minimum, step, maximum, limit, ends_exactly=contiguous).values()
    assert values == [int(value) for value in expected.split()]


@pytest.mark.parametrize(
    ("minimum", "step", "maximum", "cap", "percent", "expected"),
    [
        pytest.param(0, 8, 64, 64, 0, "0 1 2 4 8 16 24 32 40 48 56 64", id="row 13"),
        pytest.param(0, 8, 64, 64, 50, "0 1 2 4 8 16 32 64", id="row 14"),
        pytest.param(0, 8, 64, 16, 50, "0 1 2 4 8 16 32 48 64", id="row 15"),
        pytest.param(16, 16, 128, 32, 25, "16 32 48 64 80 96 128", id="row 16"),
        pytest.param(
            128, 128, 2048, 512, 25, "128 256 384 512 640 768 1024 1280 1536 2048", id="row 17, 2048 tokens"
        ),
        pytest.param(
            128,
            128,
            8192,
            2048,
            25,
            "128 256 384 512 640 768 1024 1280 1664 2048 2688 3584 4096 5376 6144 8192",
            id="row 17, 8192 tokens",
        ),
        pytest.param(0, 8, 64, 0, 50, "0 1 2 4 8 16 32 64", id="no cap is that of the maximum"),
        pytest.param(5, 5, 5, 0, 25, "5", id="one value"),
        pytest.param(0, 2, 0, 0, 25, "0", id="nothing but 0"),
        pytest.param(1, 32, 50, 0, 50, "1 2 4 8 16 32 50", id="the maximum is added"),
    ],
)
def test_padding_lists(minimum: int, step: int, maximum: int, cap: int, percent: int, expected: str) -> None:
    values = PaddingRange(minimum, step, maximum, cap, percent / 100).values()
    assert values == [int(value) for value in expected.split()]


def test_padding_defaults_row_19() -> None:
    limits = BucketLimits(
        block_size=128,
        max_model_len=4096,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        num_blocks=3593,
        max_prefill_seqs=16,
    )
    ranges = Padding.ranges(limits, PaddingOptions())
    assert ranges.prefill_batch == PaddingRange(1, 1, 16, 4, 0.25)
    assert ranges.prefill_query == PaddingRange(128, 128, 2048, 512, 0.25)
    assert ranges.prefill_context == PaddingRange(0, 2, 31, 16, 0.25)
    assert ranges.decode_batch == PaddingRange(1, 2, 64, 16, 0.25)
    assert ranges.decode_blocks == PaddingRange(128, 128, 2048, 512, 0.25)


def test_padding_row_19_contiguous_ranges_lie_in_the_pool() -> None:
    assert fit_to_pool(4096, 128, 8192, pool=3593) == (3465, 3593)
    assert fit_to_pool(128, 128, 8192, pool=3593) == (128, 3593)
    assert fit_to_pool(128, 128, 8192, pool=77) == (1, 77)
    limits = BucketLimits(128, 91_964, 256, 2048, 3593, contiguous=True)
    assert Padding.ranges(limits, PaddingOptions()).decode_blocks == PaddingRange(128, 128, 3593, 899, 0.25)


def test_padding_options_reach_their_axes() -> None:
    options = PaddingOptions(ratio=0.1, max_rows=3, max_tokens=200, max_context=5, max_blocks=77)
    ranges = Padding.ranges(QWEN, options)
    assert ranges.prefill_batch == PaddingRange(1, 1, 1, 3, 0.1)
    assert ranges.prefill_query == PaddingRange(128, 128, 2048, 200, 0.1)
    assert ranges.prefill_context == PaddingRange(0, 2, 718, 5, 0.1)
    assert ranges.decode_batch == PaddingRange(1, 2, 256, 3, 0.1)
    assert ranges.decode_blocks == PaddingRange(128, 128, 183_928, 77, 0.1)


@pytest.mark.parametrize(
    "bad", [(5, 1, 4, 0, 0.1), (0, 0, 4, 0, 0.1), (0, 1, 4, -1, 0.1), (0, 1, 4, 0, 0.51)]
)
def test_senseless_padding_ranges_are_refused(bad: tuple[int, int, int, int, float]) -> None:
    with pytest.raises(ValueError, match="padding"):
        PaddingRange(*bad)


@pytest.mark.parametrize("bad", [{"ratio": 0.6}, {"ratio": -0.1}, {"max_tokens": 0}, {"max_rows": -1}])
def test_senseless_padding_options_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="padding"):
        PaddingOptions(**bad)  # type: ignore[arg-type]


@given(st.integers(0, 300), st.integers(1, 300), st.integers(0, 5000), st.integers(0, 500), st.floats(0, 0.5))
def test_padding_stays_within_the_ratio_or_a_step(
    minimum: int, step: int, extra: int, cap: int, ratio: float
) -> None:
    maximum = minimum + extra
    values = PaddingRange(minimum, step, maximum, cap, ratio).values()
    assert values == sorted(set(values))
    assert values[-1] == maximum
    for last, value in pairwise(values):
        padding = value - last - 1
        # Below the steps the powers of two rule, and a step is the least distance between two values.
        assert value <= 2 * step or padding <= max(ratio * value, step)


def test_exponential_defaults_row_18() -> None:
    ranges = Exponential.ranges(QWEN, PaddingOptions())
    assert ranges.prefill_batch == ExponentialRange(1, 2, 1, 1)
    assert ranges.prefill_query == ExponentialRange(128, 128, 2048, 11)
    assert ranges.prefill_context == ExponentialRange(0, 1, 702, 11)
    assert ranges.decode_batch == ExponentialRange(1, 2, 256, 9)
    assert ranges.decode_blocks == ExponentialRange(1, 256, 10779, 15)


def test_exponential_defaults_clamp_a_contiguous_decode_to_the_pool() -> None:
    limits = BucketLimits(
        block_size=128,
        max_model_len=91964,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        num_blocks=3593,
        contiguous=True,
    )
    blocks = Exponential.ranges(limits, PaddingOptions()).decode_blocks
    assert blocks == ExponentialRange(1, 256, 3593, 13, ends_exactly=True)
    assert blocks.values()[-1] == 3593


def test_linear_defaults() -> None:
    limits = BucketLimits(
        block_size=128,
        max_model_len=4096,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        num_blocks=999,
        max_prefill_seqs=4,
    )
    ranges = Linear.ranges(limits, PaddingOptions())
    assert ranges.prefill_batch == LinearRange(1, 1, 4)
    assert ranges.prefill_query == LinearRange(128, 128, 2048)
    assert ranges.prefill_context == LinearRange(0, 1, 31)
    assert ranges.decode_batch == LinearRange(1, 32, 64)
    assert ranges.decode_blocks == LinearRange(1, 128, 2048)


def test_prefill_grid_row_20() -> None:
    limits = BucketLimits(
        block_size=64, max_model_len=2048, max_num_seqs=16, max_num_batched_tokens=2048, num_blocks=512
    )
    buckets = prefill_grid([1, 2, 4, 8, 16], [512, 1024], range(5), limits)
    shapes = [(1, 512), (1, 1024), (2, 512), (2, 1024), (4, 512)]
    assert [(b.batch, b.query, b.context_blocks) for b in buckets] == [
        (batch, query, context) for batch, query in shapes for context in range(5)
    ]


def test_decode_grid_row_21() -> None:
    limits = BucketLimits(
        block_size=128, max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=2048, num_blocks=2048
    )
    buckets = decode_grid([1, 2, 4, 8, 16, 32, 64], range(128, 2049, 128), limits)
    expected = [(1, 16), (2, 32), (4, 64), (8, 128)]
    expected += [(16, blocks) for blocks in (128, 256)]
    expected += [(32, blocks) for blocks in range(128, 513, 128)]
    expected += [(64, blocks) for blocks in range(128, 1025, 128)]
    assert [(b.batch, b.context_blocks) for b in buckets] == expected
    assert len(buckets) == 18
    assert {b.query for b in buckets} == {1}


@pytest.mark.parametrize("bad", [(5, 1, 4), (-1, 1, 4), (1, 0, 4)])
def test_senseless_linear_ranges_are_refused(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="linear buckets need"):
        LinearRange(*bad)


@pytest.mark.parametrize("bad", [(-1, 1, 4, 2), (1, 0, 4, 2), (1, 1, 0, 2), (1, 1, 4, 0)])
def test_senseless_exponential_ranges_are_refused(bad: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="exponential buckets need"):
        ExponentialRange(*bad)


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 5000), st.integers(1, 16))
def test_exponential_values_rise_to_the_maximum(minimum: int, step: int, extra: int, limit: int) -> None:
    maximum = minimum + extra
    values = ExponentialRange(minimum, step, maximum, limit).values()
    assert values == sorted(set(values))
    assert values[-1] == maximum
