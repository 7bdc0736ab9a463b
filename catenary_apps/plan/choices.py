"""What fits with other numbers of cards and other schemes of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from catenary_apps.plan.cards import CARDS_PER_NODE, Card
from catenary_apps.plan.config import PlanConfig
from catenary_apps.plan.dividing import LEAST_RESERVE, fitting_reserve, load
from services.engine.memory import ModelShape, WeightScheme

_SCHEMES: Final = (WeightScheme.BFLOAT16, WeightScheme.FP8, WeightScheme.INT4)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is planned. `file_bytes`: of the checkpoint's weight files, 0 if there are none; `limit`: tokens
    of the longest sequence that the model knows."""

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
    """Each power of two of cards of a node, with each scheme, and this share for graphs or less.

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
    """What to change where something does not fit: only what was found to fit, by this plan's own rules."""
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
    """Powers of two of a node's cards that divide the model's heads, rising."""
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
