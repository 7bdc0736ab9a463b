"""Choices that the container of vLLM for Gaudi would make itself: the arithmetic of its start-up rules.

Facts: vllm-project/vllm-gaudi, .cd/server/vllm_autocalc_rules.py and settings_vllm.csv. Sizes in GiB, which
the rules call GB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_TOKENS_OF_A_BLOCK: Final = 128
# Linear prefill graphs grow with the model's length beyond the one that the rules were measured at.
_MEASURED_LENGTH: Final = 4352
_GROWTH: Final = 0.8552


@dataclass(frozen=True, slots=True)
class AutocalcInputs:
    """Inputs of the rules; the defaults are those of the container for an 8B model."""

    device_gib: float
    weights_gib: float
    layers: int
    head_dim: int
    kv_heads: int
    max_model_len: int
    tensor_parallel_size: int = 1
    kv_bytes: int = 2
    unavailable_gib: float = 2.0
    profiler_gib: float = 0.0
    free_target_gib: float = 9.0
    graph_mb: float = 10.0
    block_size: int = 128
    max_num_batched_tokens: int = 2048
    max_prefill_batch: int = 1
    exponential: bool = False
    contiguous: bool = True
    lazy: bool = True
    batch_min: int = 1
    batch_step: int = 32
    length_min: int = 128
    length_step: int = 256
    context_step: int = 1


@dataclass(frozen=True, slots=True)
class Autocalc:
    """Results of the rules."""

    usable_gib: float
    gpu_memory_utilization: float
    kv_per_sequence_gib: float
    prompt_graphs: float
    decode_graphs: float
    graph_prompt_ratio: float
    graph_reserved_mem: float
    kv_gib: float
    max_num_seqs: int
    decode_block_max: int


def autocalc(given: AutocalcInputs) -> Autocalc:
    """Apply the rules. Raises ValueError, one line, if they leave no room for one sequence."""
    cards = given.tensor_parallel_size
    usable = given.device_gib - given.unavailable_gib - given.weights_gib / cards - given.profiler_gib
    if usable <= given.free_target_gib:
        raise ValueError(
            f"vLLM's rules leave {usable:.2f} GiB beside the weights and want {given.free_target_gib:g} of "
            "them free"
        )
    utilization = math.floor(100 * (1 - given.free_target_gib / usable)) / 100
    values = 2 * given.max_model_len * given.layers * given.head_dim * given.kv_heads
    per_sequence = values * given.kv_bytes / 2**30
    sequences = max(1.0, cards * usable * utilization / per_sequence)
    blocks = max(1.0, given.max_model_len * sequences / given.block_size)
    decode = _decode_graphs(given, sequences, blocks)
    prompt = _prompt_graphs(given)
    prompt_mb = prompt * given.graph_mb
    if not given.exponential:
        prompt_mb *= max(1.0, given.max_model_len / _MEASURED_LENGTH) ** _GROWTH
    decode_mb = decode * given.graph_mb
    ratio = prompt_mb / (prompt_mb + decode_mb)
    target = _up(decode_mb / 1024)
    reserve = _up(target / (usable * utilization * (1 - ratio)))
    reserve = min(max(reserve, 0.01), 0.5 if given.lazy else 0.1)
    kv = usable * utilization * (1 - reserve)
    chosen = _sequences(cards * kv / per_sequence, given.batch_step)
    return Autocalc(
        usable_gib=usable,
        gpu_memory_utilization=utilization,
        kv_per_sequence_gib=per_sequence,
        prompt_graphs=prompt,
        decode_graphs=decode,
        graph_prompt_ratio=ratio,
        graph_reserved_mem=reserve,
        kv_gib=kv,
        max_num_seqs=chosen,
        decode_block_max=max(128, math.ceil(chosen * given.max_model_len / _TOKENS_OF_A_BLOCK)),
    )


def _sequences(fitting: float, step: int) -> int:
    """Round down to a multiple of the step, or to a power of two below it."""
    if fitting < 1:
        raise ValueError(
            "vLLM's rules leave no KV for one sequence: raise tensor-parallel-size or lower max-model-len"
        )
    if fitting < step:
        return int(2 ** math.floor(math.log2(fitting)))
    return int(fitting // step) * step


def _decode_graphs(given: AutocalcInputs, sequences: float, blocks: float) -> float:
    rows = _axis(given, sequences, given.batch_min, given.batch_step)
    columns = _axis(given, blocks, given.length_min, given.length_step)
    # Half of a gathered batch's grid has more rows than blocks, or more blocks than its rows can have.
    return max(1.0, rows * columns / (1 if given.contiguous else 2))


def _prompt_graphs(given: AutocalcInputs) -> float:
    # The ramp of rows ends at their maximum, if that is below the step.
    highest = given.max_prefill_batch
    step = given.batch_step if given.exponential else min(given.batch_step, highest)
    rows = _axis(given, highest, given.batch_min, step)
    if step < given.batch_step:
        rows -= 1
    longest = given.max_num_batched_tokens
    if not given.exponential:
        longest = min(longest, given.max_model_len)
    graphs: float = rows * _axis(given, longest, given.length_min, given.length_step)
    if rows > 1:
        graphs /= 2
    most = max(1.0, (given.max_model_len - given.length_min) / given.block_size)
    least = max(1.0, (given.max_model_len - given.max_num_batched_tokens) / given.block_size)
    if given.exponential:
        contexts = [max(1.0, math.ceil(math.log2(value))) for value in (most, least)]
    else:
        contexts = [max(1.0, value / given.context_step) for value in (most, least)]
    return max(1.0, graphs * sum(contexts) / 2)


def _axis(given: AutocalcInputs, maximum: float, minimum: int, step: int) -> int:
    """Return the number of an axis's values: a ramp of powers of two and steps, or one for each bit."""
    if given.exponential:
        return 1 + math.ceil(math.log2(maximum))
    return 1 + int(math.log2(step / minimum)) + max(0, int(1 + (maximum - step) / step))


def _up(value: float) -> float:
    return math.ceil(value * 100) / 100
