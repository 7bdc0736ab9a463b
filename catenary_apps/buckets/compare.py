"""Builds and judges the plans that the options ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from catenary_apps.buckets.config import LEARNED, BucketsConfig
from catenary_apps.cli.model_sizes import ModelSizes, find_shape, sizes_of
from catenary_apps.plan.config import CARDS
from catenary_apps.plan.planning import kv_bytes_on_card
from services.engine.bucketing import (
    Bucket,
    BucketLimits,
    BucketPlan,
    PaddingOptions,
    build_plan,
    covers_every_step,
    narrow_limits,
    plan_of,
    read_bucket_file,
    taken_axes,
)
from services.engine.learning import (
    Assessment,
    Budget,
    ModelCost,
    SequenceLengths,
    StepTimes,
    StepTiming,
    Workload,
    assess,
    chat_lengths,
    estimated_times,
    fitted_times,
    learn_for,
    read_recording,
)

_MIB = 2**20
_GIB = 2**30
_DEFAULT_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Verdict:
    """A plan and what it comes to."""

    plan: BucketPlan
    assessment: Assessment
    graph_bytes: int
    covered: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """All plans on one workload. `learned` are the buckets to write, if they were learned."""

    sizes: ModelSizes
    limits: BucketLimits
    sequences: int
    source: str
    step_times: str
    verdicts: Mapping[str, Verdict]
    learned: tuple[Bucket, ...]


def compare(config: BucketsConfig, say: Callable[[str], None] = lambda _: None) -> Comparison:
    """Build, learn and judge all plans, and tell the progress.

    Raises ValueError, one line, for what cannot be done.
    """
    shape, directory = find_shape(config.model)
    sizes = sizes_of(shape)
    limits = limits_of(
        config,
        sizes,
        lambda length: kv_bytes_on_card(
            shape,
            directory,
            device=config.device,
            block_size=config.block_size,
            max_model_len=length,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_prefill_batch=config.max_prefill_batch,
        ),
    )
    learning, judging, timings, source = _lengths(config)
    times, kind = _times(config, sizes, timings)
    judge = Workload.of(judging, limits, times, seed=2)
    plans: dict[str, BucketPlan] = {}
    learned: list[Bucket] = []
    compiled = _compiled(config)
    for name in config.strategies:
        if name == LEARNED:
            say(f"learning from {len(learning)} sequences; of all strategies this one takes longest")
            learned = learn_for(
                Workload.of(learning, limits, times, seed=1), _budget(config, limits), compiled
            )
            plans[name] = plan_of(learned, limits)
        else:
            padding = PaddingOptions(ratio=config.bucketing_pad_ratio)
            plans[name] = build_plan(
                name,
                limits,
                padding=padding,
                file=config.bucketing_file,
                axes=taken_axes(name, config.axes()),
            )
    verdicts = {}
    for number, (name, plan) in enumerate(plans.items(), 1):
        say(f"judging strategy {name} by {len(judging)} sequences ({number} of {len(plans)})")
        verdicts[name] = _verdict(plan, judge, config)
    return Comparison(
        sizes=sizes,
        limits=limits,
        sequences=len(judging),
        source=source,
        step_times=kind,
        verdicts=verdicts,
        learned=tuple(learned),
    )


def limits_of(config: BucketsConfig, sizes: ModelSizes, card_kv: Callable[[int], int]) -> BucketLimits:
    """Return the limits of the engine that the options describe.

    `card_kv`: from the longest sequence's tokens to the bytes that a card leaves for KV.
    """
    length = config.max_model_len or sizes.max_position or _DEFAULT_CONTEXT
    if sizes.max_position is not None and length > sizes.max_position:
        raise ValueError(f"max-model-len {length} exceeds the model's context of {sizes.max_position} tokens")
    blocks = config.kv_blocks
    if blocks is None:
        per_token = config.kv_bytes_per_token or sizes.kv_bytes_per_token
        given = config.kv_cache_gib
        room = card_kv(length) if given is None else int(given * _GIB)
        blocks = room // (per_token * config.block_size)
        blocks = min(blocks, config.max_num_seqs * -(-length // config.block_size))
    if blocks * config.block_size < length:
        raise ValueError(
            f"{blocks} KV blocks of {config.block_size} tokens do not hold a sequence of {length}: "
            "raise kv-cache-gib or kv-blocks, or lower max-model-len"
        )
    limits = BucketLimits(
        block_size=config.block_size,
        max_model_len=length,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_blocks=blocks,
        max_prefill_seqs=config.max_prefill_batch,
        contiguous=config.contiguous,
    )
    return narrow_limits(limits, config.axes())


def _lengths(
    config: BucketsConfig,
) -> tuple[Sequence[SequenceLengths], Sequence[SequenceLengths], Sequence[StepTiming], str]:
    """Return lengths to learn from, lengths to judge by, measured step times, and where all that is from."""
    if config.lengths is None:
        seed = 1 if config.synthetic is None else config.synthetic
        pair = chat_lengths(seed, config.sequences), chat_lengths(seed + 1, config.sequences)
        return *pair, (), f"drawn chat lengths, seed {seed}, judged on seed {seed + 1}"
    recording = read_recording(config.lengths)
    lengths = recording.lengths[-config.sequences :]
    if len(lengths) < 2:
        raise ValueError(f"length file {config.lengths} holds one length; learning and judging need two")
    half = len(lengths) // 2
    return lengths[:half], lengths[half:], recording.timings, f"{config.lengths}, judged on its second half"


def _times(config: BucketsConfig, sizes: ModelSizes, timings: Sequence[StepTiming]) -> tuple[StepTimes, str]:
    if config.step_times != "estimated":
        try:
            return fitted_times(timings, block_size=config.block_size), "measured"
        except ValueError:
            if config.step_times == "measured":
                raise
    card = CARDS[config.device]
    cost = ModelCost(
        parameters=sizes.parameters,
        parameter_bytes=sizes.parameter_bytes,
        kv_bytes_per_token=config.kv_bytes_per_token or sizes.kv_bytes_per_token,
        attention_width=sizes.attention_width,
        vocab_size=sizes.vocab_size,
    )
    times = estimated_times(
        cost,
        block_size=config.block_size,
        bytes_per_second=card.bytes_per_second if config.memory_tb_s is None else config.memory_tb_s * 1e12,
        flops_per_second=card.flops_per_second
        if config.compute_tflops is None
        else config.compute_tflops * 1e12,
        launch_s=config.launch_ms / 1e3,
    )
    return times, "estimated"


def _budget(config: BucketsConfig, limits: BucketLimits) -> Budget:
    graphs = config.max_graphs
    size = None if config.graph_budget_gib is None else int(config.graph_budget_gib * _GIB)
    if graphs is None and size is None:
        exponential = build_plan("exponential", limits)
        graphs = len(exponential.prefill) + len(exponential.decode)
    return Budget(
        graphs=graphs,
        graph_bytes=size,
        prefill_graph_bytes=max(1, int(config.prefill_graph_mib * _MIB)),
        decode_graph_bytes=max(1, int(config.decode_graph_mib * _MIB)),
        new_graph_price=config.new_graph_price,
        padding_price=config.padding_price,
    )


def _compiled(config: BucketsConfig) -> Sequence[Bucket]:
    return () if config.compiled is None else read_bucket_file(config.compiled)


def _verdict(plan: BucketPlan, judge: Workload, config: BucketsConfig) -> Verdict:
    size = len(plan.prefill) * config.prefill_graph_mib + len(plan.decode) * config.decode_graph_mib
    return Verdict(plan, assess(plan, judge), int(size * _MIB), covers_every_step(plan, judge.limits))
