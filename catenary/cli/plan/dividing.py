"""How a card's memory is divided: weights, activations, graphs, KV. The engine's arithmetic, on estimates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from catenary.cli.plan.cards import Card
from catenary.cli.plan.config import PlanConfig
from services.engine.memory import (
    GraphReserve,
    InsufficientMemory,
    KvPlan,
    MemoryPlan,
    ModelShape,
    WeightScheme,
    count_weights,
    estimate_profile,
    heads_per_card,
    plan_kv,
    plan_memory,
)

GIB: Final = 2**30
_MOST_SEQS: Final = 256
_SEQS_STEP: Final = 32
# Published: the 14.96 GiB of Llama 3.1 8B's parameters take 15.05 GiB once they are loaded.
_LOADED: Final = 1.006


def block_bytes_of(config: PlanConfig, shape: ModelShape) -> int:
    """Bytes of a KV block on one card. Raises ValueError as `heads_per_card` does."""
    heads, kv_heads = heads_per_card(shape, config.tensor_parallel_size)
    width = 1 if config.kv_cache_dtype == "fp8" else 2
    return shape.layers * shape.kv_values_of(kv_heads, heads) * width * config.block_size


def divide_memory(
    config: PlanConfig, shape: ModelShape, card: Card, scheme: WeightScheme, *, file_bytes: int
) -> MemoryPlan:
    """The engine's arithmetic, with what is given in place of what is estimated.

    file_bytes: of the checkpoint's weight files, 0 if there are none: they correct the count from the config.
    Raises ValueError, one line, if nothing is left for KV.
    """
    total = round(card.memory_gib * GIB)
    if config.free_gib is not None:
        weights, profile, free = 0, 0, round(config.free_gib * GIB)
        total = max(total, free)
    else:
        weights = _weights(config, shape, scheme, file_bytes)
        profile = _profile(config, shape) if config.profile_gib is None else round(config.profile_gib * GIB)
        free = total - weights
    if config.free_gib is not None and free < block_bytes_of(config, shape):
        raise ValueError(f"free-gib {config.free_gib:g} is less than a KV block: give what the card has free")
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
        padding=block_bytes_of(config, shape),
    )


def _weights(config: PlanConfig, shape: ModelShape, scheme: WeightScheme, file_bytes: int) -> int:
    if config.weights_gib is not None:
        return round(config.weights_gib * GIB)
    size = count_weights(shape, config.tensor_parallel_size).bytes(scheme) * _LOADED
    if file_bytes and not shape.quantized:
        stored = WeightScheme.FLOAT32 if shape.float32 else WeightScheme.BFLOAT16
        size *= file_bytes / count_weights(shape).bytes(stored)
    return int(size)


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
    for cards in card_counts(shape, config.tensor_parallel_size + 1):
        if count_weights(shape, cards).bytes(scheme) * _LOADED + profile < 0.9 * card.memory_gib * GIB:
            return text + f"raise tensor-parallel-size to {cards}, or keep weights in fewer bits (dtype)"
    return text + "choose a smaller model, or keep weights in fewer bits (dtype)"


def card_counts(shape: ModelShape, least: int = 1) -> Iterable[int]:
    """Tensor-parallel sizes that divide the model's heads, rising."""
    for cards in range(least, shape.heads + 1):
        divides = shape.kv_heads % cards == 0 or cards % shape.kv_heads == 0
        if shape.heads % cards == 0 and divides:
            yield cards


def divide_kv(config: PlanConfig, memory: MemoryPlan, block_bytes: int, limit: int) -> tuple[KvPlan, int]:
    """The KV pool and the sequences that run at once. Raises ValueError if a sequence does not fit."""

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
