"""Settings to paste: as options of the engine and as variables of vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from catenary_apps.plan.config import PlanConfig
from catenary_apps.plan.dividing import GIB
from catenary_apps.plan.planning import Planned
from services.engine.bucketing import AXIS_OPTIONS, long_name
from services.engine.memory import WeightScheme

_VLLM_STRATEGIES = {"linear": "lin", "exponential": "exp", "padding": "pad"}
# Options that have one name and meaning in both.
_SHARED_OPTIONS = (
    "max-model-len",
    "max-num-seqs",
    "max-num-batched-tokens",
    "gpu-memory-utilization",
    "block-size",
)
_VLLM_AXES = {
    "bucket_prefill_batch": "VLLM_PROMPT_BS_BUCKET",
    "bucket_prefill_query": "VLLM_PROMPT_QUERY_BUCKET",
    "bucket_prefill_context": "VLLM_PROMPT_CTX_BUCKET",
    "bucket_decode_batch": "VLLM_DECODE_BS_BUCKET",
    "bucket_decode_blocks": "VLLM_DECODE_BLOCK_BUCKET",
}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Options of `python -m services.engine`, and options and variables of `vllm serve` for the same."""

    engine: Mapping[str, str]
    vllm: Mapping[str, str]
    variables: Mapping[str, str]


def recommend(found: Planned) -> Recommendation:
    """The plan's settings: a plan with exactly these has the same figures."""
    config, limits = found.config, found.limits
    reserve = _exact(found.draft.reserve)
    strategy = long_name(config.bucketing_strategy)
    engine = {
        "model": config.model,
        "device": "hpu",
        "max-model-len": str(limits.max_model_len),
        "max-num-seqs": str(limits.max_num_seqs),
        "max-num-batched-tokens": str(limits.max_num_batched_tokens),
        "max-prefill-batch": str(limits.max_prefill_seqs),
        "block-size": str(limits.block_size),
        "gpu-memory-utilization": _exact(config.gpu_memory_utilization),
        "graph-reserved-mem": reserve,
        "graph-prompt-ratio": _exact(config.graph_prompt_ratio),
        "recipe-cache": "~/.cache/catenary/recipes",
        "bucketing-strategy": strategy,
    }
    variables = {
        "VLLM_GRAPH_RESERVED_MEM": reserve,
        "VLLM_GRAPH_PROMPT_RATIO": engine["graph-prompt-ratio"],
        "VLLM_PROMPT_BS_BUCKET_MAX": engine["max-prefill-batch"],
        "VLLM_CONTIGUOUS_PA": str(config.contiguous_kv).lower(),
        "VLLM_SKIP_WARMUP": "false",
        "PT_HPU_RECIPE_CACHE_CONFIG": "/var/cache/recipes,false,16384",
    }
    if config.max_capture_tokens is not None:
        engine["max-capture-tokens"] = str(config.max_capture_tokens)
    if config.kv_cache_gib is not None:
        engine["kv-cache-gib"] = _exact(config.kv_cache_gib)
    if config.allow_long_max_model_len:
        engine["allow-long-max-model-len"] = "true"
        variables["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    if strategy == "file":
        engine["bucketing-file"] = variables["VLLM_BUCKETING_FROM_FILE"] = str(config.bucketing_file)
    else:
        variables["VLLM_BUCKETING_STRATEGY"] = _VLLM_STRATEGIES[strategy]
    if strategy == "padding":
        engine |= _padding_options(config)
    if config.contiguous_kv:
        engine |= {"contiguous-kv": "true", "enable-prefix-caching": "false"}
    for option in AXIS_OPTIONS:
        text = getattr(config, option)
        if text is not None:
            engine[option.replace("_", "-")] = text
            for name, value in (part.split("=") for part in text.replace(" ", "").split(",")):
                variables[f"{_VLLM_AXES[option]}_{name.upper()}"] = value
    if config.tensor_parallel_size > 1:
        seconds = 100 * math.ceil(max(3600, 2 * found.graphs.cold_s.high) / 100)
        variables["PT_HPU_ENABLE_LAZY_COLLECTIVES"] = "true"
        variables["VLLM_ENGINE_ITERATION_TIMEOUT_S"] = str(seconds)
        variables["VLLM_RPC_TIMEOUT"] = str(1000 * seconds)
    return Recommendation(engine, _vllm_options(found, engine), variables)


def _vllm_options(found: Planned, engine: Mapping[str, str]) -> dict[str, str]:
    options = {name: engine[name] for name in _SHARED_OPTIONS}
    options |= {"tensor-parallel-size": str(found.config.tensor_parallel_size), "dtype": "bfloat16"}
    converted = found.scheme is WeightScheme.FP8 and not found.shape.quantized
    if found.config.kv_cache_dtype == "fp8" or converted:
        options["quantization"] = "inc"
    if found.config.kv_cache_gib is not None:
        options["num-gpu-blocks-override"] = str(found.kv.num_blocks)
    if found.config.max_capture_tokens is not None:
        options["max-seq-len-to-capture"] = str(found.config.max_capture_tokens)
    if found.config.kv_cache_dtype == "fp8":
        options["kv-cache-dtype"] = "fp8_inc"
    return options


def _padding_options(config: PlanConfig) -> dict[str, str]:
    caps = ("max_rows", "max_tokens", "max_context", "max_blocks")
    given = {name: getattr(config, f"bucketing_pad_{name}") for name in caps}
    return {"bucketing-pad-ratio": _exact(config.bucketing_pad_ratio)} | {
        f"bucketing-pad-{name.replace('_', '-')}": str(cap) for name, cap in given.items() if cap is not None
    }


def _exact(value: float) -> str:
    """The shortest text that is read as the same number."""
    return str(value).removesuffix(".0")


def gib(count: float) -> float:
    """Bytes as GiB, to four places."""
    return round(count / GIB, 4)
