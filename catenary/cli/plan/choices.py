"""What fits with other numbers of cards and other schemes of weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from catenary.cli.plan.cards import CARDS_PER_NODE, Card
from catenary.cli.plan.config import PlanConfig
from catenary.cli.plan.dividing import block_bytes_of, card_counts, divide_kv, divide_memory
from services.engine.memory import ModelShape, WeightScheme

_SCHEMES: Final = (WeightScheme.BFLOAT16, WeightScheme.FP8, WeightScheme.INT4)


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


def find_choices(
    config: PlanConfig, shape: ModelShape, card: Card, limit: int, *, file_bytes: int
) -> tuple[Choice, ...]:
    """Each power of two of cards of a node, with each scheme. None if the memory was given as it is free."""
    if config.free_gib is not None:
        return ()
    cards = [count for count in card_counts(shape) if count <= CARDS_PER_NODE and count & (count - 1) == 0]
    return tuple(_choices(config, shape, card, limit, cards, file_bytes))


def _choices(
    config: PlanConfig, shape: ModelShape, card: Card, limit: int, counts: list[int], file_bytes: int
) -> Iterator[Choice]:
    for cards in counts:
        # What was measured holds for the plan's own cards and scheme alone.
        other = config.model_copy(
            update={
                "tensor_parallel_size": cards,
                "weights_gib": None,
                "profile_gib": None,
                "graph_gib": None,
                "max_num_seqs": None,
            }
        )
        for scheme in _SCHEMES:
            try:
                memory = divide_memory(other, shape, card, scheme, file_bytes=file_bytes)
                kv, _ = divide_kv(other, memory, block_bytes_of(other, shape), limit)
            except ValueError:
                yield Choice(cards, scheme, 0, 0, 0, 0)
                continue
            each = -(-kv.max_model_len // config.block_size)
            yield Choice(
                cards, scheme, memory.weights, kv.num_blocks, kv.max_model_len, kv.num_blocks // each
            )
