"""Divide a card's memory among weights, graphs and KV; find the cards and weight schemes that fit a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from catenary_apps.plan.config import CARDS_PER_NODE, Card, PlanConfig
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
    stored_scheme,
)

GIB: Final = 2**30
_MOST_SEQS: Final = 256
_SEQS_STEP: Final = 32
# Tokens of an ordinary sequence, if nobody says: several turns of a chat, or a few pages and their summary.
EXPECTED: Final = 4096
# Published: the 14.96 GiB of Llama 3.1 8B's parameters take 15.05 GiB once they are loaded.
_LOADED: Final = 1.006
# Shares of the usable memory that a plan sets aside for graphs, in hundredths.
LEAST_RESERVE: Final = 0.01
MOST_RESERVE: Final = 0.5
# Digits of a reserve that is computed from a measurement: so few that it can be typed.
_DIGITS: Final = 6


class DoesNotFitError(ValueError):
    """The model, or a sequence of the length asked for, does not fit the card."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A card with a model: bytes of all memory, of the weights, of the largest prefill, and the options and
    the block that the rest is divided by.

    `free`: beside the weights. `limit`: tokens of the longest sequence that the model knows.
    """

    config: PlanConfig
    total: int
    weights: int
    profile: int
    free: int
    block_bytes: int
    limit: int

    def given_reserve(self) -> float | None:
        """Return the share for graphs that the options ask for; None leaves it to the plan.

        Raises ValueError.
        """
        config = self.config
        if config.graph_gib is None:
            return config.graph_reserved_mem
        usable = int((self.free - self.profile) * config.gpu_memory_utilization)
        share = config.graph_gib * GIB / usable
        if share >= 1:
            raise ValueError(
                f"graph-gib {config.graph_gib:g} leaves nothing for KV of the usable {usable / GIB:.2f} GiB: "
                "lower it"
            )
        return round(share, _DIGITS)

    def divide(self, reserve: float, seqs: int | None = None) -> tuple[MemoryPlan, KvPlan]:
        """Return the memory with this share for graphs, and the KV pool of so many sequences at once.

        Raises DoesNotFitError.
        """
        config = self.config
        try:
            memory = plan_memory(
                total=self.total,
                weights=self.weights,
                free=self.free,
                utilization=config.gpu_memory_utilization,
                activations=self.profile,
                reserve=GraphReserve(reserve),
                padding=self.block_bytes,
                kv_bytes=None if config.kv_cache_gib is None else round(config.kv_cache_gib * GIB),
            )
            kv = plan_kv(
                budget_bytes=memory.kv,
                bytes_per_token=self.block_bytes // config.block_size,
                block_size=config.block_size,
                max_num_seqs=seqs or config.max_num_seqs or _MOST_SEQS,
                model_limit=self.limit,
                max_model_len=config.max_model_len,
                spare=not config.contiguous_kv,
            )
        except InsufficientMemory as error:
            raise DoesNotFitError(str(error).replace(" or raise kv-cache-gib", "")) from None
        return memory, kv

    def sequences(self, kv: KvPlan) -> int:
        """Return sequences that run at once: as given, or of the expected length as many as the KV holds."""
        config = self.config
        if config.max_num_seqs is not None:
            return config.max_num_seqs
        each = -(-expected_length(config, kv) // config.block_size)
        return recommended_seqs(max(1, min(_MOST_SEQS, config.max_num_batched_tokens, kv.num_blocks // each)))


def fitting_reserve(loaded: Loaded, wanted: float) -> float:
    """Return the share for graphs up to `wanted` that leaves a sequence its KV: in hundredths if it is less.

    Raises DoesNotFitError if none does.
    """
    if _fits(loaded, wanted):
        return wanted
    least, most = round(100 * LEAST_RESERVE), math.ceil(100 * wanted) - 1
    loaded.divide(LEAST_RESERVE)
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if _fits(loaded, middle / 100) else (least, middle - 1)
    return least / 100


def _fits(loaded: Loaded, reserve: float) -> bool:
    try:
        loaded.divide(reserve)
    except DoesNotFitError:
        return False
    return True


def expected_length(config: PlanConfig, kv: KvPlan) -> int:
    """Return tokens of an ordinary sequence."""
    return min(config.expected_len or config.max_model_len or EXPECTED, kv.max_model_len)


def recommended_seqs(fitting: int) -> int:
    """Round down to a multiple of 32 or a power of two: bucket sizes, so that no row is always padding."""
    return fitting // _SEQS_STEP * _SEQS_STEP if fitting >= _SEQS_STEP else 1 << (fitting.bit_length() - 1)


def block_bytes_of(config: PlanConfig, shape: ModelShape) -> int:
    """Return bytes of a KV block on one card. Raises ValueError as `heads_per_card` does."""
    heads, kv_heads = heads_per_card(shape, config.tensor_parallel_size)
    width = 1 if config.kv_cache_dtype == "fp8" else 2
    return shape.layers * shape.kv_values_of(kv_heads, heads) * width * config.block_size


def load(
    config: PlanConfig, shape: ModelShape, card: Card, scheme: WeightScheme, *, file_bytes: int, limit: int
) -> Loaded:
    """Return a card with the model's weights, with what is given in place of what is estimated.

    file_bytes: of the checkpoint's weight files, 0 if there are none: they correct the count from the config.
    Raises ValueError, one line; DoesNotFitError if nothing is left for KV.
    """
    total, block_bytes = round(card.memory_gib * GIB), block_bytes_of(config, shape)
    if config.free_gib is not None:
        free = round(config.free_gib * GIB)
        if free < block_bytes:
            raise ValueError(
                f"free-gib {config.free_gib:g} is less than a KV block: give what the card has free"
            )
        return Loaded(config, max(total, free), 0, 0, free, block_bytes, limit)
    weights = _weights(config, shape, scheme, file_bytes)
    profile = (
        _profile(config, shape, limit) if config.profile_gib is None else round(config.profile_gib * GIB)
    )
    if total - weights - profile <= 0:
        raise DoesNotFitError(
            f"the weights take {weights / GIB:.2f} GiB in {scheme.value} and activations "
            f"{profile / GIB:.2f} GiB of each card's {card.memory_gib:.2f} GiB"
        )
    return Loaded(config, total, weights, profile, total - weights, block_bytes, limit)


def _weights(config: PlanConfig, shape: ModelShape, scheme: WeightScheme, file_bytes: int) -> int:
    if config.weights_gib is not None:
        return round(config.weights_gib * GIB)
    size = count_weights(shape, config.tensor_parallel_size).bytes(scheme) * _LOADED
    if file_bytes:
        size *= file_bytes / count_weights(shape).bytes(stored_scheme(shape))
    return int(size)


def _profile(config: PlanConfig, shape: ModelShape, limit: int) -> int:
    """Return a profile run of the largest prefill without context, as vLLM makes it."""
    axes, cards = config.axes(), config.tensor_parallel_size
    rows = min(config.max_prefill_batch, axes.prefill_batch.max or config.max_prefill_batch)
    longest = min(config.max_num_batched_tokens, axes.prefill_query.max or config.max_num_batched_tokens)
    length = min(longest, config.max_model_len or limit)
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


_SCHEMES: Final = (WeightScheme.BFLOAT16, WeightScheme.FP8, WeightScheme.INT4)


@dataclass(frozen=True, slots=True)
class Subject:
    """The model to plan for.

    `file_bytes`: of the checkpoint's weight files, 0 if there are none; `limit`: tokens of the longest
    sequence that the model knows.
    """

    config: PlanConfig
    shape: ModelShape
    card: Card
    scheme: WeightScheme
    file_bytes: int
    limit: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to place the model.

    `kv_blocks` 0: the weights, or a sequence of the length asked for, do not fit. `max_num_seqs`: sequences
    of `max_model_len` tokens that the KV holds.
    """

    cards: int
    scheme: WeightScheme
    weights: int
    kv_blocks: int
    max_model_len: int
    max_num_seqs: int


def find_choices(subject: Subject, reserve: float) -> tuple[Choice, ...]:
    """Try each power of two of cards of a node, with each scheme, and this share for graphs or less.

    None if the memory was given as it is free.
    """
    if subject.config.free_gib is not None:
        return ()
    schemes = {*_SCHEMES, subject.scheme}
    ordered = [scheme for scheme in WeightScheme if scheme in schemes]
    return tuple(
        _choice(subject, cards, scheme, reserve) for cards in _counts(subject.shape) for scheme in ordered
    )


def advise(subject: Subject) -> str:
    """Return changes that make a model fit; each was found to fit by this plan's own rules."""
    config = subject.config
    cards, measured = config.tensor_parallel_size, (config.weights_gib, config.free_gib)
    if any(value is not None for value in measured):
        return "choose a smaller model, lower max-model-len, or use a card with more memory"
    found = [
        choice
        for choice in find_choices(subject, LEAST_RESERVE)
        if choice.kv_blocks and choice.cards >= cards
    ]
    more = next((c for c in found if c.scheme is subject.scheme), None)
    size = {scheme: scheme.linear_bytes(1024) for scheme in WeightScheme}
    smaller = [c for c in found if size[c.scheme] < size[subject.scheme]]
    fewer = min(smaller, key=lambda c: (c.cards, -size[c.scheme]), default=None)
    ways = []
    if more is not None:
        ways.append(f"raise tensor-parallel-size to {more.cards}")
    if fewer is not None:
        beside = f" and tensor-parallel-size {fewer.cards}" if fewer.cards > cards else ""
        ways.append(f"keep weights in fewer bits (--dtype {fewer.scheme.value}{beside})")
    if ways:
        return ", or ".join(ways)
    return (
        f"neither the {CARDS_PER_NODE} cards of a node nor fewer bits hold it: choose a smaller model, or "
        "lower max-model-len"
    )


def _counts(shape: ModelShape) -> list[int]:
    """Return powers of two of a node's cards that divide the model's heads, rising."""
    powers = (1 << bit for bit in range(CARDS_PER_NODE.bit_length()))
    return [
        cards
        for cards in powers
        if shape.heads % cards == 0 and (shape.kv_heads % cards == 0 or cards % shape.kv_heads == 0)
    ]


def _choice(subject: Subject, cards: int, scheme: WeightScheme, reserve: float) -> Choice:
    config = subject.config
    changes: dict[str, object] = {"tensor_parallel_size": cards}
    if (cards, scheme) != (config.tensor_parallel_size, subject.scheme):
        # What was measured holds for the plan's own cards and scheme alone.
        changes |= {"weights_gib": None, "profile_gib": None, "kv_cache_gib": None}
    other = config.model_copy(update=changes)
    try:
        loaded = load(
            other,
            subject.shape,
            subject.card,
            scheme,
            file_bytes=subject.file_bytes,
            limit=subject.limit,
        )
        _, kv = loaded.divide(fitting_reserve(loaded, reserve))
    except ValueError:
        return Choice(cards, scheme, 0, 0, 0, 0)
    each = -(-kv.max_model_len // config.block_size)
    return Choice(cards, scheme, loaded.weights, kv.num_blocks, kv.max_model_len, kv.num_blocks // each)
