"""Does the planning: weights, memory, KV, buckets, graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from catenary.cli.model_sizes import find_shape
from catenary.cli.plan.autocalc import Autocalc, AutocalcInputs, autocalc
from catenary.cli.plan.cards import CARDS, Card
from catenary.cli.plan.choices import Choice, find_choices
from catenary.cli.plan.config import PlanConfig
from catenary.cli.plan.dividing import GIB, block_bytes_of, divide_kv, divide_memory
from catenary.cli.plan.graphs import GraphEstimate, estimate_graphs
from services.engine.bucketing import BucketLimits, BucketPlan, build_plan
from services.engine.memory import (
    KvPlan,
    MemoryPlan,
    ModelFigures,
    ModelShape,
    WeightScheme,
    count_weights,
    estimate_activations,
    heads_per_card,
)

_DEFAULT_CONTEXT: Final = 4096
_MEASURABLE: Final = ("device_memory_gib", "weights_gib", "profile_gib", "free_gib", "graph_gib")
_COMPUTED = {
    "auto": WeightScheme.BFLOAT16,
    "float16": WeightScheme.BFLOAT16,
    "float32": WeightScheme.BFLOAT16,
}


@dataclass(frozen=True, slots=True)
class Planned:
    """All that was found.

    `peak`: activations of the largest forward, context included; `model_limit`: tokens of the model's
    context; `measured`: quantities that were given and not estimated; `rules`: what vLLM's container would
    choose; `choices`: what would fit otherwise.
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
    choices: tuple[Choice, ...]

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
    file_bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    card = _card(config)
    scheme = _COMPUTED.get(config.dtype) or WeightScheme(config.dtype)
    heads, kv_heads = heads_per_card(shape, config.tensor_parallel_size)
    block_bytes = block_bytes_of(config, shape)
    memory = divide_memory(config, shape, card, scheme, file_bytes=file_bytes)
    limit = _context_limit(config, shape)
    kv, seqs = divide_kv(config, memory, block_bytes, limit)
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
        measured=tuple(name for name in _MEASURABLE if getattr(config, name) is not None),
        rules=_rules(config, shape, card, limits, memory),
        choices=find_choices(config, shape, card, limit, file_bytes=file_bytes),
    )


def _context_limit(config: PlanConfig, shape: ModelShape) -> int:
    """Tokens of the longest sequence that the model knows, or is asked to go to beyond that."""
    limit, wanted = shape.max_position or config.max_model_len or _DEFAULT_CONTEXT, config.max_model_len
    if wanted is None or wanted <= limit:
        return limit
    if not config.allow_long_max_model_len:
        raise ValueError(
            f"max-model-len {wanted} exceeds the model's context of {limit} tokens: lower it, or set "
            "allow-long-max-model-len"
        )
    return wanted


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
