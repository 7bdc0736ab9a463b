"""Settings of bucket axes: their text, which strategy takes which, and what becomes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from services.engine.bucketing import (
    AXIS_OPTIONS,
    STRATEGIES,
    AxisOptions,
    Bucket,
    BucketAxes,
    BucketLimits,
    LinearRange,
    PaddingOptions,
    build_plan,
    covers_every_step,
    parse_axis,
    taken_axes,
)
from services.engine.config import EngineConfig

# The published start-up log of an 8B model: at most 4 sequences of 2,048 tokens, prompts to 1,024.
LOGGED = BucketLimits(128, 2048, 4, 4096, 1519, max_prefill_seqs=4)


def axes(**texts: str) -> BucketAxes:
    return BucketAxes.parse({f"bucket_{name}": text for name, text in texts.items()})


def test_a_text_gives_any_of_the_settings() -> None:
    everything = parse_axis("bucket_decode_blocks", " min=1, step=2 ,max=3,pad_max=0,pad_percent=50")
    assert everything == AxisOptions(1, 2, 3, 0, 50)
    assert parse_axis("bucket_decode_blocks", "max=7").given == ("max",)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "bucket_decode_batch",
            "",
            "expected min=N,step=N,max=N,pad_max=N,pad_percent=N, any of these, not ''",
        ),
        ("bucket_decode_batch", "most=3", "not 'most=3'"),
        ("bucket_decode_batch", "min", "not 'min'"),
        ("bucket_decode_batch", "min=1,min=2", "min is given twice"),
        ("bucket_decode_batch", "min=-1", "min must be a whole number, not '-1'"),
        ("bucket_decode_batch", "min=1e3", "min must be a whole number"),
        ("bucket_decode_batch", "min=²", "min must be a whole number"),
        ("bucket_decode_batch", "min=0", "min must be 1 to 2147483647, not 0"),
        ("bucket_decode_batch", "step=0", "step must be 1 to"),
        ("bucket_decode_batch", "max=99999999999999999999", "max must be a whole number"),
        ("bucket_decode_batch", "pad_percent=51", "pad_percent must be 0 to 50, not 51"),
        ("bucket_decode_batch", "min=9,max=8", "min 9 exceeds max 8"),
    ],
)
def test_a_wrong_text_is_refused_by_its_option(name: str, text: str, words: str) -> None:
    with pytest.raises(ValueError, match="bucket_decode_batch: ") as caught:
        parse_axis(name, text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_context_alone_may_begin_and_end_at_zero() -> None:
    assert parse_axis("bucket_prefill_context", "min=0,max=0") == AxisOptions(min=0, max=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bucket_decode_batch": "step=4"}, "bucket_decode_batch: bucketing_strategy exponential spaces its"),
        ({"bucket_prefill_query": "min=2"}, "takes min=1 of bucket_prefill_query and max of"),
        (
            {"bucketing_strategy": "lin", "bucket_prefill_query": "pad_max=2"},
            "bucket_prefill_query: pad_max needs bucketing_strategy padding, not linear",
        ),
        (
            {"bucketing_strategy": "file", "bucketing_file": "f", "bucket_prefill_query": "max=2"},
            "bucket_prefill_query needs bucketing_strategy linear or padding, not file",
        ),
        ({"bucketing_strategy": "pad", "bucket_decode_blocks": "up=2"}, "bucket_decode_blocks: expected"),
    ],
)
def test_the_engine_refuses_settings_that_nothing_would_honour(options: dict[str, str], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        EngineConfig(**options)  # type: ignore[arg-type]


def test_the_engine_takes_what_its_strategy_honours() -> None:
    EngineConfig(bucket_prefill_query="min=1", bucket_prefill_batch="max=2")
    every = dict.fromkeys(AXIS_OPTIONS, "min=1,step=1,max=8")
    EngineConfig(bucketing_strategy="linear", **every)  # type: ignore[arg-type]
    EngineConfig(bucketing_strategy="pad", bucket_decode_batch="pad_percent=10,pad_max=3")


def test_the_published_log_has_24_prompt_and_48_decode_shapes() -> None:
    batch, length = LinearRange(1, 32, 4).values(), LinearRange(128, 128, 1024).values()
    assert len(batch) * len(length) == 24
    batch, blocks = LinearRange(1, 128, 4).values(), LinearRange(128, 128, 2048).values()
    assert len(batch) * len(blocks) == 48
    plan = build_plan(
        "linear",
        LOGGED,
        axes=axes(
            prefill_batch="min=1,step=32,max=4",
            prefill_query="min=128,step=128,max=1024",
            prefill_context="max=0",
            decode_batch="min=1,step=128,max=4",
            decode_blocks="min=128,step=128,max=2048",
        ),
    )
    assert len(plan.axes["prefill_batch"]) * len(plan.axes["prefill_query"]) == 24
    assert len(plan.axes["decode_batch"]) * len(plan.axes["decode_blocks"]) == 48
    # Four sequences of 2,048 tokens have 64 blocks at the most, so that few of the 48 differ.
    assert plan.decode == (Bucket(1, 1, 16), Bucket(2, 1, 32), Bucket(4, 1, 64))
    prompts = [bucket for bucket in plan.prefill if bucket.context_blocks == 0]
    assert len(prompts) == 24
    # A sequence of 2,048 tokens that lost its KV is computed again in two chunks: that takes one more.
    assert [bucket for bucket in plan.prefill if bucket.context_blocks] == [Bucket(1, 1024, 16)]
    assert plan.notes == (
        "no bucket of the axes covers every prefill step, so (1, 1024, 16) is added: raise max of "
        "bucket_prefill_query or context",
    )


def test_settings_replace_the_strategys_own() -> None:
    plan = build_plan(
        "linear", LOGGED, axes=axes(prefill_batch="max=2", prefill_query="step=512", decode_batch="step=2")
    )
    assert plan.max_prefill_batch == 2
    assert {bucket.query for bucket in plan.prefill} == {128, 256, 512, 1024, 1536, 2048}
    assert {bucket.batch for bucket in plan.decode} == {1, 2, 4}
    assert plan.notes == ()


def test_a_maximum_of_the_chunk_bounds_every_chunk() -> None:
    plan = build_plan("padding", LOGGED, axes=axes(prefill_query="max=300"))
    assert plan.max_prefill_query == 300
    assert covers_every_step(plan, LOGGED)
    assert plan.notes == ()


def test_padding_by_axis_wins_over_the_strategys() -> None:
    def lengths(text: str) -> set[int]:
        plan = build_plan(
            "padding",
            LOGGED,
            padding=PaddingOptions(ratio=0.5),
            axes=axes(prefill_query=text, decode_batch="min=1"),
        )
        return {bucket.query for bucket in plan.prefill}

    assert lengths("max=2048") == {128, 256, 512, 1024, 2048}
    assert lengths("max=2048,pad_percent=0") == set(range(128, 2049, 128))
    assert {1024, 1280, 1536} <= lengths("max=2048,pad_max=256")


def test_exponential_takes_a_first_length_of_one_and_a_bound_on_rows() -> None:
    plain = build_plan("exponential", LOGGED)
    chosen = build_plan("exp", LOGGED, axes=axes(prefill_query="min=1", prefill_batch="max=1"))
    assert {bucket.query for bucket in chosen.prefill} == {1, *(bucket.query for bucket in plain.prefill)}
    assert {bucket.batch for bucket in chosen.prefill} == {1}
    mixed = axes(prefill_query="min=1,step=4", decode_blocks="max=3")
    assert taken_axes("exponential", mixed) == axes(prefill_query="min=1")
    assert taken_axes("linear", mixed) == mixed
    assert taken_axes("file", mixed) == BucketAxes()


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ({"prefill_batch": "max=8"}, "bucket_prefill_batch ends at 4 and not at its max 8"),
        ({"prefill_query": "max=4096"}, "bucket_prefill_query ends at 2048 and not at its max 4096"),
        ({"decode_batch": "max=64"}, "bucket_decode_batch ends at 4 and not at its max 64"),
        ({"prefill_context": "max=99"}, "bucket_prefill_context ends at 16 and not at its max 99"),
        ({"decode_batch": "max=2"}, "covers every decode step, so (4, 1, 64) is added"),
        ({"decode_blocks": "min=1,max=9"}, "covers every decode step, so (4, 1, 64) is added"),
    ],
)
def test_what_cannot_be_as_asked_is_said(text: dict[str, str], note: str) -> None:
    plan = build_plan("linear", LOGGED, axes=axes(**text))
    assert len(plan.notes) == 1
    assert note in plan.notes[0]
    assert covers_every_step(plan, LOGGED)


def test_row_19_a_contiguous_range_lies_in_the_pool() -> None:
    limits = BucketLimits(128, 91_964, 256, 2048, 3593, contiguous=True)
    plan = build_plan("padding", limits, axes=axes(decode_blocks="min=4096,step=128,max=8192"))
    assert {bucket.context_blocks for bucket in plan.decode} == {3465, 3593}
    assert "the KV pool has no more blocks" in plan.notes[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ({"decode_batch": "min=64"}, "bucket_decode_batch: min 64 exceeds 4: no more sequences run at once"),
        ({"prefill_query": "min=24576"}, r"bucket_prefill_query: min 24576 exceeds 2048: .*lower min"),
        ({"prefill_context": "min=17,max=18"}, "bucket_prefill_context: min 17 exceeds 16"),
    ],
)
def test_a_minimum_beyond_the_limits_is_refused(text: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_plan("linear", LOGGED, axes=axes(**text))


def test_too_many_buckets_are_refused_before_they_are_listed() -> None:
    limits = replace(LOGGED, max_model_len=1_000_000, num_blocks=2**30, max_num_seqs=4096)
    with pytest.raises(
        ValueError, match="bucket_decode_blocks: step 1 makes more than 100000 values up to 32000000"
    ):
        build_plan("linear", limits, axes=axes(decode_blocks="step=1"))
    with pytest.raises(ValueError, match="the decode axes make 16441344 buckets, more than 2000000: choose"):
        build_plan(
            "linear",
            limits,
            axes=axes(prefill_context="max=0", decode_batch="step=1", decode_blocks="step=8000"),
        )


def setting(least: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(least, 40) | st.integers(least, 4000)


def axis(least: int) -> st.SearchStrategy[AxisOptions]:
    return st.builds(
        AxisOptions,
        setting(least),
        setting(1),
        setting(least),
        setting(0),
        st.none() | st.integers(0, 50),
    )


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(STRATEGIES)),
    st.builds(BucketAxes, axis(1), axis(1), axis(0), axis(1), axis(1)),
    st.integers(1, 200),
    st.integers(2, 2000),
    st.integers(1, 9),
    st.integers(0, 500),
    st.booleans(),
)
def test_whatever_the_axes_every_step_has_a_bucket_or_the_start_is_refused(
    strategy: str, chosen: BucketAxes, block: int, length: int, seqs: int, tokens: int, contiguous: bool
) -> None:
    pool = -(-length // block) * (1 + tokens % seqs)
    limits = BucketLimits(block, length, seqs, seqs + tokens, pool, max_prefill_seqs=3, contiguous=contiguous)
    wanted = taken_axes(strategy, chosen)
    try:
        plan = build_plan(strategy, limits, axes=wanted)
    except ValueError:
        with pytest.raises(ValueError, match=r"bucket_\w+: min \d+ exceeds \d+: .*; lower min"):
            build_plan(strategy, limits, axes=wanted)
        return
    assert covers_every_step(plan, limits)
    assert plan.max_prefill_batch <= 3
    assert plan.max_decode_batch == min(seqs, seqs if contiguous else plan.max_decode_blocks)
