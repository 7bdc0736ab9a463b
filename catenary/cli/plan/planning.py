"""Does the planning: weights, memory, KV, buckets, graphs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from catenary.cli.model_sizes import find_shape
from catenary.cli.plan.autocalc import Autocalc, AutocalcInputs, autocalc
from catenary.cli.plan.cards import CARDS, Card
from catenary.cli.plan.config import PlanConfig
from catenary.cli.plan.graphs import GraphEstimate, estimate_graphs
from services.engine.bucketing import BucketLimits, BucketPlan, build_plan
from services.engine.memory import (
    GraphReserve,
    InsufficientMemory,
    KvPlan,
    MemoryPlan,
    ModelFigures,
    ModelShape,
    WeightScheme,
    count_weights,
    estimate_activations,
    estimate_profile,
    heads_per_card,
    plan_kv,
    plan_memory,
)

GIB: Final = 2**30
_DEFAULT_CONTEXT: Final = 4096
_MOST_SEQS: Final = 256
_SEQS_STEP: Final = 32
# Published: the 14.96 GiB of Llama 3.1 8B's parameters take 15.05 GiB once they are loaded.
_LOADED: Final = 1.006
_MODELLED = {
    "auto": WeightScheme.BFLOAT16,
    "float16": WeightScheme.BFLOAT16,
    "float32": WeightScheme.BFLOAT16,
}


@dataclass(frozen=True, slots=True)
class Planned:
    """All that was found.

    `peak`: activations of the largest forward, context included; `model_limit`: tokens of the model's
    context; `measured`: quantities that were given and not estimated; `rules`: what vLLM's container would
    choose.
    """

    config: PlanConfig
    shape: ModelShape
    card: Card
    scheme: WeightScheme
    memory: MemoryPlan
    kv: KvPlan
    limits: BucketLimits
    plan: BucketPlan
    graphs: GraphEstimate
    peak: int
    block_bytes: int
    model_limit: int
    measured: tuple[str, ...]
    rules: Autocalc | None

    @property
    def most_seqs(self) -> int:
        """Sequences of full length that the KV holds."""
        return self.kv.num_blocks // self.limits.blocks_per_sequence

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the KV and the model hold."""
        return min(self.model_limit, self.kv.num_blocks * self.limits.block_size)

    @property
    def active_weight_bytes(self) -> float:
        """Bytes of one card's weights that a decode step of one sequence reads."""
        count = count_weights(self.shape, self.config.tensor_parallel_size)
        experts = self.scheme.linear_bytes(count.experts)
        skipped = experts * (1 - self.shape.experts_chosen / self.shape.experts) if self.shape.experts else 0
        return count.bytes(self.scheme) - skipped


def make_plan(config: PlanConfig) -> Planned:
    """Does all the work. Raises ValueError, one line, for what cannot be done or does not fit."""
    shape, directory = find_shape(config.model)
    card = _card(config)
    scheme = _MODELLED.get(config.dtype) or WeightScheme(config.dtype)
    heads, kv_heads = heads_per_card(shape, config.tensor_parallel_size)
    block_bytes = _block_bytes(config, shape, heads, kv_heads)
    memory = _memory(config, shape, card, scheme, block_bytes, directory)
    limit = shape.max_position or config.max_model_len or _DEFAULT_CONTEXT
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(
            f"max-model-len {config.max_model_len} exceeds the model's context of {limit} tokens"
        )
    kv, seqs = _divide(config, memory, block_bytes, limit)
    limits = BucketLimits(
        block_size=config.block_size,
        max_model_len=kv.max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_blocks=kv.num_blocks,
        max_prefill_seqs=config.max_prefill_batch,
        contiguous=config.contiguous_kv,
    )
    plan = build_plan(
        config.bucketing_strategy,
        limits,
        padding=config.padding(),
        file=config.bucketing_file,
        axes=config.axes(),
    )
    graphs = estimate_graphs(
        plan,
        layers=shape.layers,
        hidden=shape.hidden,
        max_capture_tokens=config.max_num_batched_tokens,
        fp8=scheme is WeightScheme.FP8,
    )
    return Planned(
        config=config,
        shape=shape,
        card=card,
        scheme=scheme,
        memory=memory,
        kv=kv,
        limits=limits,
        plan=plan,
        graphs=graphs,
        peak=_peak(shape, heads, kv_heads, plan, limits),
        block_bytes=block_bytes,
        model_limit=limit,
        measured=tuple(
            name
            for name in ("device_memory_gib", "weights_gib", "profile_gib", "free_gib", "graph_gib")
            if getattr(config, name) is not None
        ),
        rules=_rules(config, shape, card, limits, memory),
    )


def _card(config: PlanConfig) -> Card:
    known = CARDS.get(config.device) or Card("custom", 0.0, 0.0, 0.0, 0.0, fp8_max=448)
    return replace(
        known,
        memory_gib=known.memory_gib if config.device_memory_gib is None else config.device_memory_gib,
        bytes_per_second=known.bytes_per_second if config.memory_tb_s is None else config.memory_tb_s * 1e12,
        flops_per_second=known.flops_per_second
        if config.compute_tflops is None
        else config.compute_tflops * 1e12,
    )


def _block_bytes(config: PlanConfig, shape: ModelShape, heads: int, kv_heads: int) -> int:
    width = 1 if config.kv_cache_dtype == "fp8" else 2
    return shape.layers * shape.kv_values_of(kv_heads, heads) * width * config.block_size


def _memory(
    config: PlanConfig, shape: ModelShape, card: Card, scheme: WeightScheme, block_bytes: int, directory: Path
) -> MemoryPlan:
    total = round(card.memory_gib * GIB)
    if config.free_gib is not None:
        weights, profile, free = 0, 0, round(config.free_gib * GIB)
        total = max(total, free)
    else:
        weights = _weights(config, shape, scheme)
        profile = _profile(config, shape) if config.profile_gib is None else round(config.profile_gib * GIB)
        free = total - weights
    if free - profile <= 0:
        raise ValueError(_too_large(config, shape, card, scheme, weights, profile))
    share = config.graph_reserved_mem
    usable = int((free - profile) * config.gpu_memory_utilization)
    if config.graph_gib is not None:
        share = config.graph_gib * GIB / usable
        if share >= 1:
            raise ValueError(
                f"graph-gib {config.graph_gib:g} leaves nothing for KV of the usable {usable / GIB:.2f} GiB: "
                "lower it"
            )
    return plan_memory(
        total=total,
        weights=weights,
        free=free,
        utilization=config.gpu_memory_utilization,
        activations=profile,
        reserve=GraphReserve(share),
        padding=block_bytes,
    )


def _weights(config: PlanConfig, shape: ModelShape, scheme: WeightScheme) -> int:
    if config.weights_gib is not None:
        return round(config.weights_gib * GIB)
    return int(count_weights(shape, config.tensor_parallel_size).bytes(scheme) * _LOADED)


def _profile(config: PlanConfig, shape: ModelShape) -> int:
    """A profile run of the largest prefill without context, as vLLM makes it."""
    axes, cards = config.axes(), config.tensor_parallel_size
    rows = min(config.max_prefill_batch, axes.prefill_batch.max or config.max_prefill_batch)
    longest = min(config.max_num_batched_tokens, axes.prefill_query.max or config.max_num_batched_tokens)
    length = min(longest, config.max_model_len or longest)
    tokens = min(config.max_num_batched_tokens, rows * length)
    width = shape.expert_inner * shape.experts_chosen + shape.shared_inner if shape.experts else 0
    return estimate_profile(
        tokens=tokens,
        rows=rows,
        mlp_width=-(-max(width, shape.inner if shape.dense_layers else 0) // cards),
        hidden=shape.hidden,
        vocab=-(-shape.vocab // cards),
        item_size=2,
        gated=shape.gated,
    )


def _too_large(
    config: PlanConfig, shape: ModelShape, card: Card, scheme: WeightScheme, weights: int, profile: int
) -> str:
    text = (
        f"the weights take {weights / GIB:.2f} GiB and activations {profile / GIB:.2f} GiB of each card's "
        f"{card.memory_gib:.2f} GiB: "
    )
    for cards in _sizes(shape, config.tensor_parallel_size):
        if count_weights(shape, cards).bytes(scheme) * _LOADED + profile < 0.9 * card.memory_gib * GIB:
            return text + f"raise tensor-parallel-size to {cards}, or keep weights in fewer bits (dtype)"
    return text + "choose a smaller model, or keep weights in fewer bits (dtype)"


def _sizes(shape: ModelShape, above: int) -> Iterable[int]:
    for cards in range(above + 1, shape.heads + 1):
        divides = shape.kv_heads % cards == 0 or cards % shape.kv_heads == 0
        if shape.heads % cards == 0 and divides:
            yield cards


def _divide(config: PlanConfig, memory: MemoryPlan, block_bytes: int, limit: int) -> tuple[KvPlan, int]:
    """The KV pool and the sequences that run at once."""

    def divide(seqs: int) -> KvPlan:
        try:
            return plan_kv(
                budget_bytes=memory.kv,
                bytes_per_token=block_bytes // config.block_size,
                block_size=config.block_size,
                max_num_seqs=seqs,
                model_limit=limit,
                max_model_len=config.max_model_len,
                spare=not config.contiguous_kv,
            )
        except InsufficientMemory as error:
            hint = "lower max-model-len, or raise tensor-parallel-size or gpu-memory-utilization"
            raise ValueError(str(error).replace("lower max-model-len or raise kv-cache-gib", hint)) from None

    if config.max_num_seqs is not None:
        return divide(config.max_num_seqs), config.max_num_seqs
    kv = divide(_MOST_SEQS)
    fitting = min(
        _MOST_SEQS, config.max_num_batched_tokens, kv.num_blocks // -(-kv.max_model_len // config.block_size)
    )
    return kv, recommended_seqs(fitting)


def recommended_seqs(fitting: int) -> int:
    """As many, down to a multiple of 32 or a power of two: bucket sizes, so that no row is always padding."""
    return fitting // _SEQS_STEP * _SEQS_STEP if fitting >= _SEQS_STEP else 1 << (fitting.bit_length() - 1)


def _peak(shape: ModelShape, heads: int, kv_heads: int, plan: BucketPlan, limits: BucketLimits) -> int:
    figures = ModelFigures(
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        heads=heads,
        kv_bytes_per_token=shape.kv_values_of(kv_heads, heads) * 2,
        item_size=2,
    )
    size = limits.block_size
    return estimate_activations(
        figures,
        max(plan.prefill, key=lambda bucket: bucket.prefill_tokens(size)),
        max(plan.decode, key=lambda bucket: bucket.context_blocks),
        block_size=size,
        rows=limits.max_num_seqs,
    )


def _rules(
    config: PlanConfig, shape: ModelShape, card: Card, limits: BucketLimits, memory: MemoryPlan
) -> Autocalc | None:
    """What vLLM's container would choose, if it knows the card and finds room."""
    if card.name not in CARDS or memory.weights == 0:
        return None
    try:
        return autocalc(
            AutocalcInputs(
                device_gib=card.nominal_gb,
                weights_gib=memory.weights * config.tensor_parallel_size / GIB,
                layers=shape.layers,
                head_dim=shape.head_dim,
                kv_heads=shape.kv_heads,
                max_model_len=limits.max_model_len,
                tensor_parallel_size=config.tensor_parallel_size,
                kv_bytes=1 if config.kv_cache_dtype == "fp8" else 2,
                block_size=limits.block_size,
                exponential=config.bucketing_strategy in ("exponential", "exp"),
                contiguous=config.contiguous_kv,
            )
        )
    except ValueError:
        return None
