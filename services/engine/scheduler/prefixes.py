"""What a sequence finds when it starts, cached or of a shared prompt, and what it leaves there."""

from __future__ import annotations

from dataclasses import dataclass

from catenary.blockhash import BlockHashes, chain
from services.engine.kv import BlockMove, BlockPool
from services.engine.scheduler.sequence import Sequence
from services.engine.scheduler.sharing import SharedPrompt


@dataclass(frozen=True, slots=True)
class Demand:
    """Blocks that a waiting sequence needs, and the tokens `start` that are computed then.

    `hits` hold the first of these tokens; `idle` of them are used by nobody and count as free until they are
    acquired. `missing` are to be allocated beside them, and the first of those begins with tokens of the
    block `copied`, if that is not None. A group of beams takes `rows` rows and `beside` more blocks.
    """

    hits: list[int]
    idle: int
    missing: int
    start: int = 0
    copied: int | None = None
    shared: bool = False
    rows: int = 1
    beside: int = 0

    @property
    def allocated(self) -> int:
        """Blocks to be allocated."""
        return self.missing + self.beside


def demand_of(sequence: Sequence, pool: BlockPool, shared: SharedPrompt | None) -> Demand:
    """What there is of all tokens of a waiting sequence but the last one: its logits have to be computed.

    `shared`: its prompt, if that is kept. Else it is looked up in the cache, unless the sequence wants log
    probabilities of its prompt, which is computed in full for the sake of the logits on the way.
    """
    length, size = len(sequence.token_ids), pool.block_size
    total = pool.blocks_for(length)
    if shared is not None:
        start = min(shared.length, length - 1)
        full = start // size
        copied = shared.blocks[full] if start % size else None
        return Demand(shared.blocks[:full], 0, total - full, start, copied, shared=True)
    if not pool.prefix_caching or sequence.params.sampling.prompt_logprobs >= 0:
        return Demand([], 0, total)
    hittable = (length - 1) // size
    hits = pool.lookup(_hashes(sequence, hittable, size)[:hittable])
    return Demand(hits, pool.idle(hits), total - len(hits), len(hits) * size)


def take_blocks(
    sequence: Sequence, demand: Demand, pool: BlockPool
) -> tuple[list[int], tuple[BlockMove, ...]]:
    """Acquires the hits and allocates the rest; returns the block table, and what is to be copied into it.

    The hits come first: what an allocation evicts may then be none of them. Only the first start counts as
    cached for the caller, and only tokens of the prompt do.
    """
    if demand.shared:
        pool.share(demand.hits)
    else:
        pool.acquire(demand.hits)
    if not sequence.num_preemptions:
        _count_tokens(sequence, demand, pool)
    fresh = pool.allocate(demand.missing)
    copies: tuple[BlockMove, ...] = ()
    if demand.copied is not None:
        copies = (BlockMove(demand.copied, fresh[0], demand.start % pool.block_size),)
    return demand.hits + fresh, copies


def _count_tokens(sequence: Sequence, demand: Demand, pool: BlockPool) -> None:
    if not demand.shared:
        # What was fetched for it had to be given up.
        sequence.num_transferred_tokens = 0
    if sequence.num_transferred_tokens:
        # All but the last token is there: the rest of it was found here.
        sequence.num_cached_tokens = demand.start - sequence.num_transferred_tokens
    elif pool.prefix_caching:
        sequence.num_cached_tokens = min(len(demand.hits) * pool.block_size, sequence.prompt_len)


def publish_blocks(sequence: Sequence, start: int, end: int, pool: BlockPool) -> None:
    """Publishes the blocks that the computation of tokens [start, end) has filled."""
    publish_table(sequence, sequence.block_table, start, end, pool)


def publish_table(sequence: Sequence, table: list[int], start: int, end: int, pool: BlockPool) -> None:
    """The same of tokens that are in the blocks of this table."""
    size = pool.block_size
    first, last = start // size, end // size
    if first == last or not pool.prefix_caching:
        return
    hashes = _hashes(sequence, last, size)
    for index in range(first, last):
        pool.publish(table[index], hashes[index])


def prompt_name(sequence: Sequence, tokens: int, block_size: int) -> bytes:
    """What ties KV to the sequence's first tokens and salt: their name as blocks are chained, 16 bytes."""
    full = tokens // block_size
    hashes = _hashes(sequence, full, block_size)
    parent = hashes[full - 1] if full else b""
    return chain(parent, sequence.token_ids[full * block_size : tokens], salt=sequence.cache_salt)


def cached_prefix(sequence: Sequence, tokens: int, pool: BlockPool) -> list[int]:
    """The cached blocks that hold the beginning of the sequence's first tokens."""
    if not pool.prefix_caching:
        return []
    full = tokens // pool.block_size
    return pool.lookup(_hashes(sequence, full, pool.block_size)[:full])


def _hashes(sequence: Sequence, blocks: int, block_size: int) -> list[bytes]:
    """The hashes of at least the first `blocks` blocks, which must be full."""
    if sequence.hashes is None:
        sequence.hashes = BlockHashes(block_size, sequence.cache_salt)
    known = len(sequence.hashes.hashes)
    if known < blocks:
        sequence.hashes.extend(sequence.token_ids[known * block_size : blocks * block_size])
    return sequence.hashes.hashes
