"""How many KV blocks an engine gets. Pure numbers."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.memory.errors import GIB, InsufficientMemory


@dataclass(frozen=True, slots=True)
class KvPlan:
    """The size of the KV pool and the longest sequence that the engine serves with it."""

    num_blocks: int
    max_model_len: int


def plan_kv(
    *,
    budget_bytes: int,
    bytes_per_token: int,
    block_size: int,
    max_num_seqs: int,
    model_limit: int,
    max_model_len: int | None,
    spare: bool = False,
) -> KvPlan:
    """Divides the budget into blocks. The padding block is not among them and not paid from the budget.

    `max_model_len` None means the model's limit, or less if the budget does not hold that. `spare`: take all
    of the budget, more than `max_num_seqs` sequences of maximum length could use, so that the rest keeps
    prefixes. Raises InsufficientMemory if the length asked for does not fit, or none does.
    """
    block_bytes = bytes_per_token * block_size
    fitting = max(0, budget_bytes) // block_bytes
    wanted = max_model_len if max_model_len is not None else min(model_limit, fitting * block_size)
    blocks_each = -(-wanted // block_size)
    if blocks_each > fitting or wanted < 2:
        length = max_model_len or model_limit
        needed = -(-length // block_size) * block_bytes
        raise InsufficientMemory(
            f"a sequence of max-model-len {length} needs {needed / GIB:.2f} GiB of KV cache and "
            f"{max(0, budget_bytes) / GIB:.2f} GiB are there for it, enough for "
            f"{fitting * block_size} tokens: lower max-model-len or raise kv-cache-gib"
        )
    used = blocks_each * max_num_seqs
    return KvPlan(num_blocks=fitting if spare else min(fitting, used), max_model_len=wanted)
