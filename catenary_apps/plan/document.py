"""A plan as JSON."""

from __future__ import annotations

import json
from typing import Any

from catenary.gaudi import supported
from catenary_apps.plan.choices import Choice
from catenary_apps.plan.planning import Planned
from catenary_apps.plan.recommend import gib, recommend
from catenary_apps.plan.traps import find_traps, unserved
from services.engine.bucketing import Bucket
from services.engine.memory import active_parameters

_MIB = 2**20


def as_json(found: Planned) -> str:
    """One JSON object, a line for each key; docs/gaudi.md has its schema."""
    lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in document(found).items())
    return "{\n" + ",\n".join(lines) + "\n}"


def document(found: Planned) -> dict[str, Any]:
    """What `as_json` prints."""
    memory, config, limits = found.memory, found.config, found.limits
    settings = recommend(found)
    return {
        "model": found.shape.name,
        "device": found.card.name,
        "software": None if config.device == "custom" else supported(),
        "tensor_parallel_size": config.tensor_parallel_size,
        "weight_dtype": found.scheme.value,
        "not_served": unserved(found),
        "measured": list(found.measured),
        "variables": dict(found.origins),
        "device_memory_gib": gib(memory.total),
        "weights_gib": gib(memory.weights),
        "profile_gib": gib(memory.activations),
        "free_gib": gib(memory.available),
        "usable_gib": gib(memory.usable),
        "graph_gib": gib(memory.graphs),
        "kv_gib": gib(memory.kv),
        "margin_gib": gib(memory.available - memory.usable),
        "padding_block_gib": gib(found.block_bytes),
        "kv_blocks": found.kv.num_blocks,
        "block_size": limits.block_size,
        "block_mib": round(found.block_bytes / _MIB, 4),
        "kv_tokens": found.kv.num_blocks * limits.block_size,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "expected_len": found.ordinary,
        "graph_reserved_mem": found.draft.reserve,
        "largest_max_model_len": found.longest,
        "largest_max_num_seqs": found.most_seqs,
        "prompt_buckets": _triples(found.plan.prefill),
        "decode_buckets": _triples(found.plan.decode),
        "axes": {name: list(values) for name, values in found.plan.axes.items()},
        "graphs": _graphs(found),
        "warmup": {
            "cold_least_s": round(found.graphs.cold_s.low, 1),
            "cold_most_s": round(found.graphs.cold_s.high, 1),
            "cached_least_s": round(found.graphs.cached_s.low, 1),
            "cached_most_s": round(found.graphs.cached_s.high, 1),
        },
        "decode_tokens_per_second_bound": decode_bound(found),
        "prefill_tokens_per_second_bound": prefill_bound(found),
        "choices": [_choice(choice) for choice in found.choices],
        "recommended": {
            "engine": None if unserved(found) else dict(settings.engine),
            "vllm": dict(settings.vllm),
            "variables": dict(settings.variables),
        },
        "vllm_autocalc": None
        if found.rules is None
        else {name: getattr(found.rules, name) for name in found.rules.__slots__},
        "warnings": [{"name": trap.name, "text": trap.text} for trap in find_traps(found)],
    }


def decode_bound(found: Planned) -> float | None:
    """Tokens a second of one sequence, if the memory's speed alone counts."""
    if not found.card.bytes_per_second:
        return None
    return round(found.card.bytes_per_second / found.active_weight_bytes, 1)


def prefill_bound(found: Planned) -> float | None:
    """Prompt tokens a second, if the matrix units' speed alone counts: two operations for each parameter."""
    if not found.card.flops_per_second:
        return None
    # The head computes the last token of a prompt alone.
    layers = active_parameters(found.shape) - found.shape.vocab * found.shape.hidden
    each = 2 * layers / found.config.tensor_parallel_size
    return round(found.card.flops_per_second / each)


def _graphs(found: Planned) -> dict[str, int | float]:
    graphs, reserve, ratio = found.graphs, found.memory.graphs, found.config.graph_prompt_ratio
    return {
        "prompt": graphs.prefill,
        "decode": graphs.decode,
        "eager_prompts": graphs.eager_prefills,
        "least_gib": gib(graphs.bytes.low),
        "most_gib": gib(graphs.bytes.high),
        "kept_gib": gib(graphs.kept_bytes),
        "prompt_gib": gib(reserve * ratio),
        "decode_gib": gib(reserve * (1 - ratio)),
    }


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "tensor_parallel_size": choice.cards,
        "weight_dtype": choice.scheme.value,
        "weights_gib": gib(choice.weights),
        "kv_blocks": choice.kv_blocks,
        "max_model_len": choice.max_model_len,
        "max_num_seqs": choice.max_num_seqs,
    }


def _triples(buckets: tuple[Bucket, ...]) -> list[list[int]]:
    return [[bucket.batch, bucket.query, bucket.context_blocks] for bucket in buckets]
