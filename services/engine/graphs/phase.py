"""The kinds of device computation in a step, and what their static shapes are called by."""

from __future__ import annotations

from enum import Enum

from services.engine.bucketing import Bucket


class Phase(Enum):
    """PREFILL and DECODE run in buckets; HEAD (logits) for a number of rows, CLEAR and MOVE of blocks.

    READ and WRITE are copies of blocks to the host and from there, where engines hand KV on.

    The others are what sampling is made of where shapes are static, `sampling.static` says for what counts.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    HEAD = "head"
    CLEAR = "clear"
    MOVE = "move"
    READ = "read"
    WRITE = "write"
    GREEDY = "greedy"
    NORMALIZE = "normalize"
    EDIT = "edit"
    PENDING = "pending"
    PENALIZE = "penalize"
    MASK = "mask"
    DRAW = "draw"
    FILTER = "filter"
    FILTER_WIDE = "filter_wide"
    FINISH = "finish"
    LOGPROBS = "logprobs"
    BEAMS = "beams"
    SCORE = "score"
    RESULT = "result"


Key = Bucket | int
"""A bucket, or the count that the phase's shape follows from."""


def size_of(phase: Phase, key: Key, block_size: int) -> int:
    """Tokens that a computation of this static shape touches, padding included: its cost in a rough unit."""
    if isinstance(key, int):
        return key
    if phase is Phase.PREFILL:
        return key.prefill_tokens(block_size)
    return key.batch + key.context_blocks * block_size


def name_of(phase: Phase, key: Key) -> str:
    """The shape as people read it in logs."""
    if isinstance(key, int):
        return f"{phase.value} count:{key}"
    return f"{phase.value} batch_size:{key.batch} query_len:{key.query} num_blocks:{key.context_blocks}"
