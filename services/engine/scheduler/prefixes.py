"""What a sequence finds in the prefix cache when it starts, and what it leaves there."""

from __future__ import annotations

from dataclasses import dataclass

from catenary.blockhash import BlockHashes
from services.engine.kv import BlockPool
from services.engine.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Demand:
    """Blocks that a waiting sequence needs.

    `hits` are cached; `idle` of them are used by nobody and count as free until they are acquired. `missing`
    are to be allocated beside them.
    """

    hits: list[int]
    idle: int
    missing: int


def demand_of(sequence: Sequence, pool: BlockPool) -> Demand:
    """Looks up all blocks of a waiting sequence but the last token's: its logits have to be computed.

    The KV of a sequence that wants log probabilities of its prompt is computed in full, for the sake of the
    logits on the way.
    """
    total = pool.blocks_for(len(sequence.token_ids))
    if not pool.prefix_caching or sequence.params.sampling.prompt_logprobs >= 0:
        return Demand([], 0, total)
    hittable = (len(sequence.token_ids) - 1) // pool.block_size
    hits = pool.lookup(_hashes(sequence, hittable, pool.block_size)[:hittable])
    return Demand(hits, pool.idle(hits), total - len(hits))


def take_blocks(sequence: Sequence, demand: Demand, pool: BlockPool) -> list[int]:
    """Acquires the hits and allocates the rest; returns the block table.

    The hits come first: what an allocation evicts may then be none of them. Only the first start counts as
    cached for the caller, and only tokens of the prompt do.
    """
    pool.acquire(demand.hits)
    if not sequence.num_preemptions:
        sequence.num_cached_tokens = min(len(demand.hits) * pool.block_size, sequence.prompt_len)
    return demand.hits + pool.allocate(demand.missing)


def publish_blocks(sequence: Sequence, start: int, end: int, pool: BlockPool) -> None:
    """Publishes the blocks that the computation of tokens [start, end) has filled."""
    size = pool.block_size
    first, last = start // size, end // size
    if first == last or not pool.prefix_caching:
        return
    hashes = _hashes(sequence, last, size)
    for index in range(first, last):
        parent = hashes[index - 1] if index else None
        token_ids = sequence.token_ids[index * size : (index + 1) * size]
        pool.publish(sequence.block_table[index], hashes[index], parent, token_ids)


def _hashes(sequence: Sequence, blocks: int, block_size: int) -> list[bytes]:
    """The hashes of at least the first `blocks` blocks, which must be full."""
    if sequence.hashes is None:
        sequence.hashes = BlockHashes(block_size, sequence.cache_salt)
    known = len(sequence.hashes.hashes)
    if known < blocks:
        sequence.hashes.extend(sequence.token_ids[known * block_size : blocks * block_size])
    return sequence.hashes.hashes
