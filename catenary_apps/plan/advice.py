"""Known traps: what a user of Gaudi cards would otherwise find out on the card."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from catenary.gaudi import PLUGIN, too_old
from catenary_apps.cli.output import counted
from catenary_apps.plan.config import CARDS_PER_NODE, PlanConfig
from catenary_apps.plan.dividing import GIB
from catenary_apps.plan.planning import Planned
from services.engine.bucketing import AXIS_OPTIONS, FILE, LONG_CONTEXT, STRATEGIES, long_name
from services.engine.memory import WeightScheme

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
    """Return the plan's settings: a plan with exactly these has the same figures."""
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
    if strategy == FILE:
        engine["bucketing-file"] = variables["VLLM_BUCKETING_FROM_FILE"] = str(config.bucketing_file)
    else:
        if STRATEGIES[strategy].vllm_name:
            variables["VLLM_BUCKETING_STRATEGY"] = STRATEGIES[strategy].vllm_name
        if STRATEGIES[strategy].padded:
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
    """Return the shortest text that is read as the same number."""
    return str(value).removesuffix(".0")


def gib(count: float) -> float:
    """Return bytes as GiB, to four places."""
    return round(count / GIB, 4)


_MANY_GRAPHS: Final = 400
# What vLLM waits for one step of its engine, and what its clients wait for the engine, by default.
_ITERATION_TIMEOUT_S: Final = 60


@dataclass(frozen=True, slots=True)
class Trap:
    """A short name for programs, and what it means and what to change for people."""

    name: str
    text: str


def find_traps(found: Planned) -> list[Trap]:
    """Return all traps that apply, in the order in which an operator would meet them."""
    return [trap for check in _CHECKS for trap in check(found)]


def unserved(found: Planned) -> list[str]:
    """Return the parts of this plan that the engine does not serve yet; empty if it serves all."""
    config, shape = found.config, found.shape
    packed = f"checkpoints quantized with {shape.quantization.method}" if shape.quantization else ""
    asked = config.dtype in ("fp8", "int8", "int4")
    missing = [
        (config.tensor_parallel_size > 1, f"an engine on {config.tensor_parallel_size} cards"),
        (shape.quantized, packed),
        (asked, f"weights in {config.dtype}"),
        (config.kv_cache_dtype == "fp8", "KV in fp8"),
        (shape.recurrent, "recurrent layers"),
    ]
    return [what for applies, what in missing if applies]


def _not_served(found: Planned) -> Iterator[Trap]:
    for what in unserved(found):
        yield Trap("not-served", f"Catenary does not serve {what} yet: this is arithmetic only")


def _packed(found: Planned) -> Iterator[Trap]:
    """Yield findings about a quantized checkpoint's config."""
    packed = found.shape.quantization
    if packed is None:
        return
    bits = "an unknown number of bits" if packed.bits is None else f"{packed.bits} bits"
    kept = f"planned in {found.scheme.value}"
    if found.config.dtype == "auto" and (packed.bits is None or packed.bits > 8):
        kept += ", which is not too little; name what they are kept in with --dtype"
    yield Trap(
        "quantized-checkpoint",
        f"the checkpoint's config says that its linear layers are packed with {packed.method} in {bits}: "
        f"{kept}",
    )
    if packed.bits == 8 and not packed.floating and found.scheme is WeightScheme.INT8:
        yield Trap(
            "int8-expands",
            "vLLM on Gaudi expands INT8 weights to bfloat16 when it loads them: there, plan with "
            "--dtype bfloat16",
        )


def _software(found: Planned) -> Iterator[Trap]:
    """Yield findings about installed packages, for the host or the image that engines are to run in."""
    try:
        refusal = too_old(metadata.version(PLUGIN))
    except metadata.PackageNotFoundError:
        return
    if refusal is not None and found.config.device != "custom":
        yield Trap("software-too-old", refusal)


def _model(found: Planned) -> Iterator[Trap]:
    shape, config = found.shape, found.config
    if shape.recurrent:
        yield Trap(
            "recurrent-layers",
            "some layers keep a state of fixed size and no KV blocks, which this plan counts as if they did: "
            "it can be wrong by a factor of four, so measure before you rely on it",
        )
    if config.dtype in ("float16", "float32") or (
        config.dtype == "auto" and (shape.float16 or shape.float32)
    ):
        kind = config.dtype if config.dtype != "auto" else "float32" if shape.float32 else "float16"
        yield Trap("forced-bfloat16", f"a Gaudi card computes a {kind} checkpoint in bfloat16")
    if found.scheme is WeightScheme.FP8 and found.card.fp8_max < 448:
        yield Trap(
            "fp8-range",
            f"{found.card.name} keeps FP8 numbers up to {found.card.fp8_max}, checkpoints have up to 448: "
            "weights are halved and their scales doubled at load",
        )


def _latent(found: Planned) -> Iterator[Trap]:
    latent = found.shape.latent
    if latent is not None:
        expanded = found.shape.kv_values_of(found.shape.kv_heads, found.shape.heads)
        times = expanded / (latent.kv_rank + latent.rotary_dim)
        yield Trap(
            "expanded-latent-kv",
            f"the engine keeps the keys and values of latent attention for each head: {times:.0f} times the "
            "KV that an engine keeps that caches the latents",
        )


def _cards(found: Planned) -> Iterator[Trap]:
    cards, shape = found.config.tensor_parallel_size, found.shape
    if shape.kv_heads < cards and shape.latent is None:
        copies = cards // shape.kv_heads
        yield Trap(
            "few-kv-heads",
            f"{shape.name} has {shape.kv_heads} KV heads for {cards} cards: each is kept {copies} times, so "
            f"that more than {shape.kv_heads} cards add no room for KV",
        )
    if cards > CARDS_PER_NODE:
        yield Trap(
            "several-nodes",
            f"{cards} cards are more than the {CARDS_PER_NODE} of a node: every layer waits for the network "
            "between nodes",
        )


def _lengths(found: Planned) -> Iterator[Trap]:
    limits, config = found.limits, found.config
    if limits.max_model_len % limits.block_size:
        rounded = limits.max_model_len // limits.block_size * limits.block_size
        yield Trap(
            "length-off-blocks",
            f"max-model-len {limits.max_model_len} is not a multiple of the block of {limits.block_size} "
            "tokens: the last block of a full sequence stays partly empty; "
            f"{max(rounded, limits.block_size)} wastes nothing",
        )
    if config.max_model_len is None and limits.max_model_len < found.model_limit:
        yield Trap(
            "short-kv",
            f"the KV holds {limits.max_model_len} tokens and the model knows {found.model_limit}: longer "
            "sequences are refused",
        )
    if config.max_num_seqs is not None and config.max_num_seqs > found.most_seqs:
        yield Trap(
            "preemption",
            f"the KV holds {counted(found.most_seqs, 'sequence')} of {limits.max_model_len} tokens and "
            f"max-num-seqs is {config.max_num_seqs}: if they grow that long, the last ones lose their KV and "
            "are computed again",
        )
    if limits.max_model_len >= LONG_CONTEXT and long_name(config.bucketing_strategy) == "linear":
        yield Trap(
            "linear-long-context",
            f"linear buckets of {limits.max_model_len} tokens are {len(found.plan.prefill)} prefill and "
            f"{len(found.plan.decode)} decode shapes: choose exponential or padding, or raise the steps",
        )


def _buckets(found: Planned) -> Iterator[Trap]:
    pool, plan = found.kv.num_blocks, found.plan
    beyond = [bucket for bucket in plan.decode if bucket.context_blocks > pool]
    if beyond:
        yield Trap(
            "decode-beyond-kv",
            f"{len(beyond)} of {len(plan.decode)} decode buckets hold up to {plan.max_decode_blocks} blocks "
            f"and the KV has {pool}: only sequences that share prefixes fill them; with strategy linear or "
            f"padding, set --bucket-decode-blocks max={pool}",
        )
    for note in plan.notes:
        yield Trap("buckets", note)
    if plan.omitted:
        yield Trap(
            "omitted-buckets", f"{len(plan.omitted)} buckets of the file exceed the limits and are left out"
        )
    shapes = len(plan.prefill) + len(plan.decode)
    if shapes > _MANY_GRAPHS:
        yield Trap(
            "many-shapes",
            f"{shapes} shapes are warmed up: fewer prompts together (--max-prefill-batch), a shorter "
            "max-model-len or strategy exponential have fewer",
        )
    if found.graphs.eager_prefills:
        yield Trap(
            "eager-prefills",
            f"{found.graphs.eager_prefills} of {len(plan.prefill)} prefill buckets have more tokens with "
            "their context than --max-capture-tokens "
            f"({found.config.max_capture_tokens or found.config.max_num_batched_tokens}) and run without a "
            "graph: such prefills are bound by compute, and their graphs would be very large",
        )


def _memory(found: Planned) -> Iterator[Trap]:
    memory, graphs = found.memory, found.graphs
    left = memory.available - memory.usable - found.block_bytes
    extra = found.peak - memory.activations
    if found.config.free_gib is None and extra > left:
        yield Trap(
            "context-beyond-margin",
            f"prefills after long contexts take about {extra / GIB:.2f} GiB more than a profile run, and the "
            f"utilization leaves {max(0, left) / GIB:.2f} GiB: lower gpu-memory-utilization or "
            "max-num-batched-tokens",
        )
    if graphs.bytes.low > memory.graphs:
        yield Trap(
            "graphs-beyond-reserve",
            f"the graphs take at least {graphs.bytes.low / GIB:.2f} GiB and {memory.graphs / GIB:.2f} GiB "
            "are set aside: those that do not fit run eagerly; raise graph-reserved-mem to "
            f"{found.draft.wanted_reserve:g} (max-model-len leaves no room for more if it is not given) or "
            "have fewer buckets",
        )
    elif graphs.bytes.high < memory.graphs / 2:
        yield Trap(
            "reserve-too-large",
            f"{memory.graphs / GIB:.2f} GiB are set aside for graphs that take at most "
            f"{graphs.bytes.high / GIB:.2f} GiB: graph-reserved-mem {found.draft.wanted_reserve:g} gives the "
            "rest to KV",
        )


def _times(found: Planned) -> Iterator[Trap]:
    cold, cached = found.graphs.cold_s, found.graphs.cached_s
    if cold.high > found.config.probe_timeout_s:
        sure = "takes" if cold.low > found.config.probe_timeout_s else "can take"
        yield Trap(
            "probe-timeout",
            f"warm-up {sure} {cold.low:.0f} to {cold.high:.0f} s and a start-up probe of "
            f"{found.config.probe_timeout_s:g} s would kill the engine: allow {2 * cold.high:.0f} s, keep a "
            f"recipe cache on a local disk ({cached.low:.0f} to {cached.high:.0f} s), or use --warmup "
            "background",
        )
    if found.config.tensor_parallel_size > 1 and cold.high > _ITERATION_TIMEOUT_S:
        yield Trap(
            "vllm-timeouts",
            "vLLM gives up on workers that compile for long: set VLLM_ENGINE_ITERATION_TIMEOUT_S and "
            "VLLM_RPC_TIMEOUT (milliseconds) above the warm-up; Catenary has no such limit",
        )


_CHECKS: Final[tuple[Callable[[Planned], Iterator[Trap]], ...]] = (
    _not_served,
    _packed,
    _software,
    _model,
    _latent,
    _cards,
    _lengths,
    _buckets,
    _memory,
    _times,
)
