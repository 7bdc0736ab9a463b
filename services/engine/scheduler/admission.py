"""What the limits, and each sequence, must fulfil so that every sequence can run to its end."""

from __future__ import annotations

from services.engine.bucketing import BucketPlan
from services.engine.kv import BlockPool
from services.engine.link import CoreErrorCode
from services.engine.scheduler.errors import SequenceRefused
from services.engine.scheduler.sequence import Sequence
from services.engine.scheduler.settings import SchedulerConfig


def set_lengths(sequence: Sequence, config: SchedulerConfig) -> None:
    """Sets the lengths, prompt and completion, between which a stop id ends the sequence."""
    sequence.shortest = sequence.prompt_len + sequence.params.min_tokens
    sequence.longest = min(config.max_model_len, sequence.prompt_len + sequence.params.max_tokens)


def check_admissible(sequence: Sequence, config: SchedulerConfig, pool: BlockPool) -> None:
    """Raises SequenceRefused for a sequence that is malformed, complete, or can never fit.

    Its lengths must be set. The pool has to hold the sequence at its longest: then the first in order can
    always go on, whatever the others hold.
    """
    invalid, too_long = CoreErrorCode.INVALID_ARGUMENT, CoreErrorCode.CONTEXT_LENGTH_EXCEEDED
    length, prompt_len, max_tokens = len(sequence.token_ids), sequence.prompt_len, sequence.params.max_tokens
    generated = sequence.num_generated_tokens
    if not 1 <= prompt_len <= length:
        raise SequenceRefused(invalid, f"prompt_len is {prompt_len} for {length} token ids")
    if max_tokens < 1:
        raise SequenceRefused(invalid, f"max_tokens must be at least 1, not {max_tokens}")
    if generated >= max_tokens:
        raise SequenceRefused(invalid, f"{generated} tokens were generated already, of {max_tokens}")
    if length >= config.max_model_len:
        raise SequenceRefused(
            too_long, f"{length} tokens leave no room to generate in a context of {config.max_model_len}"
        )
    # The last token is never fed back, so it needs no KV.
    needed = pool.blocks_for(sequence.longest - 1)
    if needed > pool.total:
        raise SequenceRefused(
            too_long,
            f"the sequence can grow to {needed} KV blocks of {pool.block_size} tokens, "
            f"and the engine has {pool.total}",
        )


def check_group(members: list[Sequence], config: SchedulerConfig, pool: BlockPool) -> None:
    """Raises SequenceRefused for a beam search that can never run, whose first member is admissible."""
    lead, width = members[0], len(members)
    if config.contiguous:
        raise SequenceRefused(
            CoreErrorCode.INVALID_ARGUMENT, "beams share KV blocks, which contiguous_kv excludes"
        )
    if width > config.max_num_seqs:
        raise SequenceRefused(
            CoreErrorCode.INVALID_ARGUMENT,
            f"a search of {width} beams does not fit max_num_seqs, {config.max_num_seqs}",
        )
    # All beams begin with the full blocks of the prompt.
    longest, common = pool.blocks_for(lead.longest - 1), lead.prompt_len // pool.block_size
    needed = longest + (width - 1) * (longest - common)
    if needed > pool.total:
        raise SequenceRefused(
            CoreErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"the beams can grow to {needed} KV blocks of {pool.block_size} tokens, "
            f"and the engine has {pool.total}",
            "use_beam_search",
        )


def check_buckets(config: SchedulerConfig, pool: BlockPool, buckets: BucketPlan) -> None:
    """Raises ValueError for buckets that do not reach what a step can hold."""
    query = min(config.prompt_budget(0), config.max_model_len - 1, buckets.max_prefill_query)
    longest = min(pool.total, pool.blocks_for(config.max_model_len - 1))
    if buckets.block_size != pool.block_size:
        raise ValueError(
            f"buckets expect blocks of {buckets.block_size} tokens, the pool has {pool.block_size}"
        )
    for tokens in (1, query):
        context = pool.blocks_for(config.max_model_len - 1 - tokens)
        if buckets.prefill_bucket(1, tokens, context) is None:
            raise ValueError(f"no prefill bucket covers {tokens} tokens after {context} blocks")
    if buckets.decode_bucket(1, longest) is None:
        raise ValueError(f"no decode bucket covers a sequence of {longest} blocks")
    if config.contiguous and pool.prefix_caching:
        raise ValueError("contiguous KV cannot share blocks: switch prefix caching off, or contiguous KV")
    # The lowest ids go out first, so none is used beyond what all that run can hold.
    slice_end = min(pool.total, config.max_num_seqs * longest)
    if config.contiguous and buckets.decode_bucket(1, slice_end) is None:
        raise ValueError(f"contiguous KV needs a decode bucket for the first {slice_end} blocks of the pool")
