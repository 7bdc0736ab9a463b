"""vLLM's bucket variables give the engine's real bucket plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catenary.config import ConfigError
from services.engine.bucketing import (
    AXIS_OPTIONS,
    BucketAxes,
    BucketLimits,
    BucketPlan,
    build_plan,
    check_axes,
    parse_axis,
)
from services.engine.config import EngineConfig
from services.engine.vllm_variables import translate
from tests.support.moved import Moved, moved

__all__ = ["moved"]

LIN = {"VLLM_BUCKETING_STRATEGY": "lin"}
PAD = {"VLLM_BUCKETING_STRATEGY": "pad"}


def plan_of(config: EngineConfig) -> BucketPlan:
    """The plan of an engine of 1,000 blocks of 128 tokens with these options."""
    limits = BucketLimits(
        block_size=128,
        max_model_len=4096,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        num_blocks=1000,
        max_prefill_seqs=config.max_prefill_batch or 4,
        contiguous=config.contiguous_kv,
    )
    return build_plan(
        config.bucketing_strategy,
        limits,
        padding=config.padding(),
        file=config.bucketing_file,
        axes=config.axes(),
    )


def queries(plan: BucketPlan) -> list[int]:
    return sorted({bucket.query for bucket in plan.prefill})


def test_strategy_chooses_the_buckets(moved: Moved) -> None:
    plans = {name: plan_of(moved.load(VLLM_BUCKETING_STRATEGY=name)) for name in ("exp", "lin", "pad", "LIN")}
    assert queries(plans["exp"]) == [128, 256, 384, 512, 768, 896, 1280, 1664, 2048]
    assert queries(plans["lin"]) == list(range(128, 2049, 128))
    assert queries(plans["pad"]) == [128, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048]
    assert plans["LIN"].prefill == plans["lin"].prefill
    assert not moved.warnings
    assert moved.refusal(VLLM_BUCKETING_STRATEGY="magic") == (
        "VLLM_BUCKETING_STRATEGY 'magic': expected exp, lin or pad"
    )


def test_old_switch_overrides_the_strategy_and_says_so(moved: Moved) -> None:
    config = moved.load(**PAD, VLLM_EXPONENTIAL_BUCKETING="false")
    assert config.bucketing_strategy == "linear"
    assert moved.warnings == (
        "VLLM_EXPONENTIAL_BUCKETING is deprecated: use VLLM_BUCKETING_STRATEGY",
        "VLLM_EXPONENTIAL_BUCKETING: Overriding bucketing strategy pad with lin",
    )
    assert moved.load(VLLM_EXPONENTIAL_BUCKETING="true").bucketing_strategy == "exponential"
    assert moved.warnings == ("VLLM_EXPONENTIAL_BUCKETING is deprecated: use VLLM_BUCKETING_STRATEGY",)
    # false changes the default, which is exp.
    moved.load(VLLM_EXPONENTIAL_BUCKETING="False")
    assert moved.warnings[1].endswith("Overriding bucketing strategy exp with lin")
    assert "must be true or false" in moved.refusal(VLLM_EXPONENTIAL_BUCKETING="perhaps")


def test_bucket_file_is_read(moved: Moved, tmp_path: Path) -> None:
    file = tmp_path / "buckets.txt"
    file.write_text("(1, [512, 2048], range(0, 32))\n([1, 32], 1, [64, 1000])\n")
    config = moved.load(VLLM_BUCKETING_FROM_FILE=str(file), VLLM_DECODE_BS_BUCKET_MAX="8")
    assert queries(plan_of(config)) == [512, 2048]
    assert moved.warnings == (
        "VLLM_DECODE_BS_BUCKET_MAX has no effect: the strategy file has its buckets from elsewhere",
    )


def test_axis_variables_move_the_buckets_of_linear(moved: Moved) -> None:
    plan = plan_of(
        moved.load(
            **LIN,
            VLLM_PROMPT_BS_BUCKET_MIN="1",
            VLLM_PROMPT_BS_BUCKET_STEP="2",
            VLLM_PROMPT_BS_BUCKET_MAX="4",
            VLLM_PROMPT_SEQ_BUCKET_MIN="256",
            VLLM_PROMPT_SEQ_BUCKET_STEP="512",
            VLLM_PROMPT_SEQ_BUCKET_MAX="1024",
            VLLM_PROMPT_CTX_BUCKET_MIN="0",
            VLLM_PROMPT_CTX_BUCKET_STEP="16",
            VLLM_PROMPT_CTX_BUCKET_MAX="31",
            VLLM_DECODE_BS_BUCKET_MIN="8",
            VLLM_DECODE_BS_BUCKET_STEP="16",
            VLLM_DECODE_BS_BUCKET_MAX="32",
            VLLM_DECODE_BLOCK_BUCKET_MIN="256",
            VLLM_DECODE_BLOCK_BUCKET_STEP="256",
            VLLM_DECODE_BLOCK_BUCKET_MAX="1024",
        )
    )
    assert sorted({bucket.batch for bucket in plan.prefill}) == [1, 2, 4]
    assert queries(plan) == [256, 512, 1024]
    assert {bucket.context_blocks for bucket in plan.prefill} >= {0, 16}
    assert sorted({bucket.batch for bucket in plan.decode}) == [8, 16, 32]
    assert sorted({bucket.context_blocks for bucket in plan.decode}) == [256, 512, 768, 1024]
    assert not moved.warnings


def test_axis_variables_bound_the_padding(moved: Moved) -> None:
    def steps(**environment: str) -> list[int]:
        return queries(plan_of(moved.load(**PAD, **environment)))

    assert steps(VLLM_PROMPT_QUERY_BUCKET_PAD_PERCENT="0") == list(range(128, 2049, 128))
    assert len(steps(VLLM_PROMPT_QUERY_BUCKET_PAD_PERCENT="50")) < len(steps())
    # Every multiple of a cap is a bucket.
    assert set(range(256, 2049, 256)) <= set(steps(VLLM_PROMPT_QUERY_BUCKET_PAD_MAX="256"))
    assert not moved.warnings
    moved.load(**LIN, VLLM_DECODE_BLOCK_BUCKET_PAD_MAX="256")
    assert moved.warnings == (
        "VLLM_DECODE_BLOCK_BUCKET_PAD_MAX has no effect: only VLLM_BUCKETING_STRATEGY=pad takes it",
    )


def test_largest_prefill_batch_bounds_the_scheduler(moved: Moved) -> None:
    for strategy in ("exp", "lin", "pad"):
        config = moved.load(VLLM_BUCKETING_STRATEGY=strategy, VLLM_PROMPT_BS_BUCKET_MAX="6")
        assert config.max_prefill_batch == 6
        assert plan_of(config).max_prefill_batch == 6
        assert not moved.warnings


def test_exponential_takes_only_what_it_does_in_vllm(moved: Moved) -> None:
    config = moved.load(
        VLLM_BUCKETING_STRATEGY="exp",
        VLLM_PROMPT_QUERY_BUCKET_MIN="1",
        VLLM_DECODE_BS_BUCKET_STEP="8",
        VLLM_PROMPT_CTX_BUCKET_MAX="9",
    )
    assert queries(plan_of(config))[0] == 1
    assert [line.split()[0] for line in moved.warnings] == [
        "VLLM_PROMPT_CTX_BUCKET_MAX",
        "VLLM_DECODE_BS_BUCKET_STEP",
    ]
    assert all("the exponential strategy spaces its buckets by itself" in line for line in moved.warnings)


# The long-context recipe of the README for Gaudi: 32K of context on an 8B model.
LONG = {
    "VLLM_GRAPH_RESERVED_MEM": "0.02",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_PROMPT_SEQ_BUCKET_MIN": "1024",
    "VLLM_PROMPT_SEQ_BUCKET_STEP": "1024",
    "VLLM_PROMPT_SEQ_BUCKET_MAX": "2048",
    "VLLM_DECODE_BLOCK_BUCKET_MIN": "256",
    "VLLM_DECODE_BLOCK_BUCKET_STEP": "256",
    "VLLM_DECODE_BLOCK_BUCKET_MAX": "1024",
}


def test_a_recipe_of_ranges_chooses_the_strategy_that_takes_them(moved: Moved) -> None:
    config = moved.load(**LONG)
    assert config.bucketing_strategy == "linear"
    assert queries(plan_of(config)) == [1024, 2048]
    assert {bucket.context_blocks for bucket in plan_of(config).decode} >= {256, 512, 768, 1024}
    assert moved.warnings == (
        "VLLM_PROMPT_SEQ_BUCKET_MIN chooses the linear strategy, as VLLM_BUCKETING_STRATEGY=lin does; "
        "VLLM_BUCKETING_STRATEGY=exp leaves the buckets to the exponential one",
    )


def test_a_named_strategy_is_kept_whatever_the_ranges(moved: Moved) -> None:
    assert moved.load(**LONG, VLLM_BUCKETING_STRATEGY="exp").bucketing_strategy == "exponential"
    assert len(moved.warnings) == 6
    assert moved.load(**LONG, **PAD).bucketing_strategy == "padding"
    assert moved.load(**LONG, VLLM_EXPONENTIAL_BUCKETING="true").bucketing_strategy == "exponential"
    assert moved.load("--bucketing-strategy", "exponential", **LONG).bucketing_strategy == "exponential"
    assert moved.load("--bucketing-strategy", "padding", **LONG).bucketing_strategy == "padding"


@pytest.mark.parametrize(
    ("variables", "strategy"),
    [
        ({}, "exponential"),
        # These two the default takes by itself.
        ({"VLLM_PROMPT_QUERY_BUCKET_MIN": "1"}, "exponential"),
        ({"VLLM_PROMPT_BS_BUCKET_MAX": "4"}, "exponential"),
        ({"VLLM_PROMPT_QUERY_BUCKET_MIN": "128"}, "linear"),
        ({"VLLM_DECODE_BS_BUCKET_STEP": "8"}, "linear"),
        ({"VLLM_PROMPT_CTX_BUCKET_MAX": "9"}, "linear"),
        ({"VLLM_DECODE_BLOCK_BUCKET_PAD_MAX": "64"}, "padding"),
        ({"VLLM_DECODE_BS_BUCKET_STEP": "8", "VLLM_DECODE_BS_BUCKET_PAD_PERCENT": "20"}, "padding"),
    ],
)
def test_single_ranges_choose_a_strategy(moved: Moved, variables: dict[str, str], strategy: str) -> None:
    assert moved.load(**variables).bucketing_strategy == strategy
    assert bool(moved.warnings) is (strategy != "exponential")


def test_older_name_counts_where_the_newer_is_not_set(moved: Moved) -> None:
    config = moved.load(
        **LIN,
        VLLM_PROMPT_SEQ_BUCKET_MIN="512",
        VLLM_PROMPT_QUERY_BUCKET_MIN="256",
        VLLM_PROMPT_SEQ_BUCKET_STEP="256",
    )
    assert config.bucket_prefill_query == "min=256,step=256"
    assert moved.warnings == (
        "VLLM_PROMPT_SEQ_BUCKET_MIN has no effect: VLLM_PROMPT_QUERY_BUCKET_MIN is set too and wins",
    )


def test_own_options_win(moved: Moved, tmp_path: Path) -> None:
    axes = {"VLLM_DECODE_BS_BUCKET_STEP": "4", "VLLM_DECODE_BS_BUCKET_PAD_MAX": "9"}
    config = moved.load("--bucketing-strategy", "linear", **PAD, **axes)
    assert (config.bucketing_strategy, config.bucket_decode_batch) == ("linear", "step=4")
    assert moved.warnings[0] == "VLLM_BUCKETING_STRATEGY: the option bucketing_strategy wins"
    assert moved.warnings[1].startswith("VLLM_DECODE_BS_BUCKET_PAD_MAX has no effect")
    config = moved.load(**LIN, CATENARY_ENGINE_BUCKETING_STRATEGY="exp", VLLM_BUCKETING_FROM_FILE="f")
    assert (config.bucketing_strategy, config.bucketing_file) == ("exp", None)
    config = moved.load("--bucket-decode-batch", "step=2", "--max-prefill-batch", "3", **LIN, **axes)
    assert config.bucket_decode_batch == "step=2"
    file = tmp_path / "options.yaml"
    file.write_text("bucket-decode-batch: step=16\n")
    assert moved.load("--config", str(file), **LIN, **axes).bucket_decode_batch == "step=16"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("VLLM_DECODE_BS_BUCKET_STEP", "0", "must be 1 to"),
        ("VLLM_DECODE_BS_BUCKET_MIN", "-1", "must be 1 to"),
        ("VLLM_PROMPT_QUERY_BUCKET_MAX", "12x", "must be a whole number"),
        ("VLLM_PROMPT_QUERY_BUCKET_MIN", "²", "must be a whole number"),
        ("VLLM_PROMPT_QUERY_BUCKET_MIN", "+-5", "must be a whole number"),
        ("VLLM_PROMPT_CTX_BUCKET_PAD_PERCENT", "51", "must be 0 to 50"),
        ("VLLM_DECODE_BLOCK_BUCKET_MAX", "9" * 30, "must be a whole number"),
    ],
)
def test_value_that_is_none_is_refused_whatever_the_strategy(
    name: str, value: str, text: str, moved: Moved
) -> None:
    for strategy in ("exp", "lin", ""):
        refusal = moved.refusal(**{name: value, "VLLM_BUCKETING_STRATEGY": strategy})
        assert refusal.startswith(name)
        assert text in refusal


def test_minimum_over_the_maximum_names_both(moved: Moved) -> None:
    refusal = moved.refusal(VLLM_DECODE_BS_BUCKET_MIN="9", VLLM_DECODE_BS_BUCKET_MAX="8")
    assert refusal == "VLLM_DECODE_BS_BUCKET_MIN 9: must not exceed VLLM_DECODE_BS_BUCKET_MAX 8"


def test_without_buckets_there_is_no_warm_up(moved: Moved) -> None:
    assert moved.load(VLLM_ENABLE_BUCKETING="true") == moved.load()
    assert moved.load(VLLM_ENABLE_BUCKETING="false").warmup == "skip"
    assert moved.warnings == (
        "VLLM_ENABLE_BUCKETING=false skips the warm-up; forwards are padded to buckets even so",
    )
    assert moved.load("--warmup", "full", VLLM_ENABLE_BUCKETING="false").warmup == "full"


_AXES = ("PROMPT_BS", "PROMPT_QUERY", "PROMPT_SEQ", "PROMPT_CTX", "DECODE_BS", "DECODE_BLOCK")
_NAMES = [
    f"VLLM_{axis}_BUCKET_{setting}"
    for axis in _AXES
    for setting in ("MIN", "STEP", "MAX", "PAD_MAX", "PAD_PERCENT")
]


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from(_NAMES), st.integers(-1, 60).map(str), max_size=12),
    st.sampled_from(["exp", "lin", "pad"]),
)
def test_every_variable_is_translated_warned_about_or_refused(
    variables: dict[str, str], strategy: str
) -> None:
    translation = refused = None
    try:
        translation = translate(variables | {"VLLM_BUCKETING_STRATEGY": strategy})
    except ConfigError as error:
        refused = str(error).split()[0]
    if translation is None:
        assert refused in variables
        return
    origins = {name for item in translation.options.values() for name in item.origin.split(", ")}
    warned = {line.split()[0] for line in translation.warnings}
    assert variables.keys() <= origins | warned
    texts = {name: translation.options[name].value for name in AXIS_OPTIONS if name in translation.options}
    long = {"exp": "exponential", "lin": "linear", "pad": "padding"}[strategy]
    # What the translation gives, the engine takes.
    check_axes(long, BucketAxes.parse(texts))
    for name, text in texts.items():
        assert parse_axis(name, text).given
