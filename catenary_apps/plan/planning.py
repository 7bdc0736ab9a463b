"""Does the planning: weights, memory, KV, buckets, graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from catenary_apps.cli.model_sizes import find_shape
from catenary_apps.plan.autocalc import Autocalc, AutocalcInputs, autocalc
from catenary_apps.plan.config import CARDS, Card, PlanConfig
from catenary_apps.plan.dividing import (
    GIB,
    LEAST_RESERVE,
    MOST_RESERVE,
    Choice,
    DoesNotFitError,
    Loaded,
    Subject,
    advise,
    expected_length,
    find_choices,
    fitting_reserve,
    load,
)
from services.engine.bucketing import Bucket, BucketLimits, BucketPlan, build_plan, long_name
from services.engine.memory import (
    KvPlan,
    MemoryPlan,
    ModelFigures,
    ModelShape,
    WeightScheme,
    count_weights,
    estimate_activations,
    heads_per_card,
    stored_scheme,
)

_MIB: Final = 2**20
# 48 decode graphs of an 8B model with 32 layers took 161.9 MiB.
_DECODE_BYTES_PER_LAYER: Final = 161.9 * _MIB / 48 / 32
# 15 prefill graphs of it, 9,984 tokens with 32 layers of 4,096 together, took 14.03 GiB: captures that keep
# what lies between (a tensor cache). Captures that free it take 5 to 20 MB, says vLLM's container, 10 for 8B;
# a user saw 20 to 30 GiB for 300.
_KEPT_BYTES_PER_VALUE: Final = 14.03 * 2**30 / (9984 * 32 * 4096)
_MOST_PREFILL_BYTES: Final = 30 * 2**30 / 300
_LEAST_PREFILL_BYTES_PER_LAYER: Final = 10e6 / 32
_LEAST_PREFILL_BYTES: Final = 5e6, 20e6

# 72 graphs of a bfloat16 8B model with 32 layers were warm in 49 s.
_LEAST_SECONDS_PER_LAYER: Final = 49 / 72 / 32
# Users saw 45 s a graph with 126 layers, and 20 to 40 s a graph before that.
_MOST_SECONDS_PER_LAYER: Final = 45 / 126
# An 8B model: 66 s cold in bfloat16, 504 s in FP8; 23 s and 34 s with a recipe cache.
_FP8_FACTOR: Final = 504 / 66
_CACHED_SHARE: Final = 23 / 66
_CACHED_SHARE_FP8: Final = 34 / 504


@dataclass(frozen=True, slots=True)
class Span:
    """From the least to the most that was published."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class GraphEstimate:
    """Graphs of each phase, how many prefills are too long for one, bytes, and seconds of warm-up.

    `kept_bytes`: if captures keep what lies between their inputs and outputs.
    """

    prefill: int
    decode: int
    eager_prefills: int
    bytes: Span
    kept_bytes: float
    cold_s: Span
    cached_s: Span


def estimate_graphs(
    plan: BucketPlan, *, layers: int, hidden: int, max_capture_tokens: int, fp8: bool
) -> GraphEstimate:
    """Return the graphs of a plan's buckets: number, memory and time.

    max_capture_tokens: prefills of more tokens, context included, run without a graph. They are compiled all
    the same.
    """
    captured = [b for b in plan.prefill if b.prefill_tokens(plan.block_size) <= max_capture_tokens]
    decode = len(plan.decode) * layers * _DECODE_BYTES_PER_LAYER
    each = min(max(layers * _LEAST_PREFILL_BYTES_PER_LAYER, _LEAST_PREFILL_BYTES[0]), _LEAST_PREFILL_BYTES[1])
    kept = sum(map(_tokens, captured)) * layers * hidden * _KEPT_BYTES_PER_VALUE
    shapes = (len(plan.prefill) + len(plan.decode)) * layers
    low = shapes * _LEAST_SECONDS_PER_LAYER * (_FP8_FACTOR if fp8 else 1)
    high = max(low, shapes * _MOST_SECONDS_PER_LAYER)
    share = _CACHED_SHARE_FP8 if fp8 else _CACHED_SHARE
    return GraphEstimate(
        prefill=len(captured),
        decode=len(plan.decode),
        eager_prefills=len(plan.prefill) - len(captured),
        bytes=Span(decode + len(captured) * each, decode + len(captured) * _MOST_PREFILL_BYTES),
        kept_bytes=decode + kept,
        cold_s=Span(low, high),
        cached_s=Span(low * share, high * share),
    )


def _tokens(bucket: Bucket) -> int:
    return bucket.batch * bucket.query


_DEFAULT_CONTEXT: Final = 4096
# Where the search for a graph reserve begins.
_FIRST_RESERVE: Final = 0.1
_MEASURABLE: Final = ("device_memory_gib", "weights_gib", "profile_gib", "free_gib", "graph_gib")


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan with one share of the memory for graphs."""

    reserve: float
    memory: MemoryPlan
    kv: KvPlan
    limits: BucketLimits
    plan: BucketPlan
    graphs: GraphEstimate

    @property
    def wanted_reserve(self) -> float:
        """The share that its graphs are expected to take, in hundredths of what is usable: the middle of the
        estimate on a logarithmic scale."""
        low, high = self.graphs.bytes.low, self.graphs.bytes.high
        share = math.sqrt(low * high) / self.memory.usable if self.memory.usable else LEAST_RESERVE
        return min(max(math.ceil(share * 100) / 100, LEAST_RESERVE), MOST_RESERVE)


@dataclass(frozen=True, slots=True)
class Planned:
    """All that was found.

    `peak`: activations of the largest forward, context included; `model_limit`: tokens of the model's
    context; `measured`: quantities that were given and not estimated; `rules`: what vLLM's container would
    choose; `choices`: what would fit otherwise; `origins`: options that come from variables of other
    programs, and their variables; `ordinary`: tokens of a sequence that max-num-seqs is chosen for, None if
    that was given.
    """

    config: PlanConfig
    shape: ModelShape
    card: Card
    scheme: WeightScheme
    draft: Draft
    peak: int
    block_bytes: int
    model_limit: int
    ordinary: int | None
    measured: tuple[str, ...]
    rules: Autocalc | None
    choices: tuple[Choice, ...]
    origins: Mapping[str, str]

    @property
    def memory(self) -> MemoryPlan:
        """How the card is divided."""
        return self.draft.memory

    @property
    def kv(self) -> KvPlan:
        """The KV pool."""
        return self.draft.kv

    @property
    def limits(self) -> BucketLimits:
        """The engine's limits."""
        return self.draft.limits

    @property
    def plan(self) -> BucketPlan:
        """The buckets."""
        return self.draft.plan

    @property
    def graphs(self) -> GraphEstimate:
        """Memory of their graphs."""
        return self.draft.graphs

    @property
    def most_seqs(self) -> int:
        """Sequences of full length that the KV holds."""
        return self.kv.num_blocks // self.limits.blocks_per_sequence

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the KV and the model hold."""
        return min(self.model_limit, self.kv.num_blocks * self.limits.block_size)

    @property
    def active_weight_bytes(self) -> float:
        """Bytes of one card's weights that a decode step of one sequence reads."""
        count = count_weights(self.shape, self.config.tensor_parallel_size)
        experts = self.scheme.linear_bytes(count.experts)
        skipped = experts * (1 - self.shape.experts_chosen / self.shape.experts) if self.shape.experts else 0
        return count.bytes(self.scheme) - skipped


def make_plan(config: PlanConfig, origins: Mapping[str, str] | None = None) -> Planned:
    """Return the plan. Every figure is that of the settings that are recommended.

    Raises ValueError, one line, for what cannot be done or does not fit.
    """
    shape, directory = find_shape(config.model)
    scheme = _scheme(config, shape)
    heads, kv_heads = heads_per_card(shape, config.tensor_parallel_size)
    limit = _context_limit(config, shape)
    file_bytes = _file_bytes(directory)
    subject = Subject(config, shape, _card(config), scheme, file_bytes, limit)
    try:
        loaded, draft = _draft_of(subject)
    except DoesNotFitError as error:
        raise ValueError(f"{error}: {advise(subject)}") from None
    return Planned(
        config=config,
        shape=shape,
        card=subject.card,
        scheme=scheme,
        draft=draft,
        peak=_peak(shape, heads, kv_heads, draft.plan, draft.limits),
        block_bytes=loaded.block_bytes,
        model_limit=limit,
        ordinary=None if config.max_num_seqs is not None else expected_length(config, draft.kv),
        measured=tuple(name for name in _MEASURABLE if getattr(config, name) is not None),
        rules=_rules(config, shape, subject.card, draft.limits, draft.memory),
        choices=find_choices(subject, draft.reserve),
        origins=origins or {},
    )


def kv_bytes_on_card(
    shape: ModelShape, directory: Path | None, *, device: Literal["gaudi2", "gaudi3"], **limits: int
) -> int:
    """Return the bytes that a card leaves for KV with the model loaded, with the share for graphs that the
    search begins with.

    `limits`: options of a plan. Raises ValueError, one line, if nothing is left.
    """
    config = PlanConfig(device=device, **limits)  # type: ignore[arg-type]
    limit = config.max_model_len or _DEFAULT_CONTEXT
    try:
        loaded = load(
            config,
            shape,
            CARDS[device],
            _scheme(config, shape),
            file_bytes=_file_bytes(directory),
            limit=limit,
        )
        return loaded.divide(_FIRST_RESERVE)[0].kv
    except DoesNotFitError as error:
        raise ValueError(f"{error}: give kv-cache-gib or kv-blocks") from None


def _file_bytes(directory: Path | None) -> int:
    """Return bytes of the weight files; 0 if there are none."""
    return 0 if directory is None else sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def _draft_of(subject: Subject) -> tuple[Loaded, Draft]:
    """Return the plan with the reserve that was given, or that its own graphs need.

    Raises DoesNotFitError.
    """
    config = subject.config

    def settled(config: PlanConfig) -> tuple[Loaded, Draft]:
        loaded = load(
            config,
            subject.shape,
            subject.card,
            subject.scheme,
            file_bytes=subject.file_bytes,
            limit=subject.limit,
        )
        given = loaded.given_reserve()
        if given is not None:
            return loaded, _drafted(subject, loaded, given)
        most = fitting_reserve(loaded, MOST_RESERVE)
        return loaded, _settle(lambda reserve: _drafted(subject, loaded, reserve), most)

    loaded, draft = settled(config)
    if config.max_model_len is None and draft.kv.max_model_len < subject.limit:
        # The largest prefill is no longer than a sequence may be: planned again as it will be served.
        update = {"max_model_len": draft.kv.max_model_len, "expected_len": expected_length(config, draft.kv)}
        loaded, draft = settled(config.model_copy(update=update))
    return loaded, draft


def _settle(make: Callable[[float], Draft], most: float) -> Draft:
    """Return the draft whose graphs take the reserve that it has, of at most `most`.

    A larger reserve leaves less KV, so fewer sequences and fewer graphs: where that goes round in a circle,
    the largest reserve of the circle has room for its graphs.
    """
    drafts: dict[float, Draft] = {}
    reserve = min(_FIRST_RESERVE, most)
    while reserve not in drafts:
        drafts[reserve] = make(reserve)
        reserve = min(drafts[reserve].wanted_reserve, most)
    tried = list(drafts)
    return drafts[max(tried[tried.index(reserve) :])]


def _drafted(subject: Subject, loaded: Loaded, reserve: float) -> Draft:
    config, shape = loaded.config, subject.shape
    memory, kv = loaded.divide(reserve)
    seqs = loaded.sequences(kv)
    memory, kv = loaded.divide(reserve, seqs)
    limits = BucketLimits(
        block_size=config.block_size,
        max_model_len=kv.max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_blocks=kv.num_blocks,
        max_prefill_seqs=config.max_prefill_batch,
        contiguous=config.contiguous_kv,
    )
    plan = build_plan(
        config.bucketing_strategy,
        limits,
        padding=config.padding(),
        file=config.bucketing_file,
        axes=config.axes(),
    )
    graphs = estimate_graphs(
        plan,
        layers=shape.layers,
        hidden=shape.hidden,
        max_capture_tokens=config.max_capture_tokens or config.max_num_batched_tokens,
        fp8=subject.scheme is WeightScheme.FP8,
    )
    return Draft(reserve, memory, kv, limits, plan, graphs)


def _scheme(config: PlanConfig, shape: ModelShape) -> WeightScheme:
    """Return how weights are kept on the card: packed ones as they are packed, others in bfloat16."""
    if config.dtype in ("fp8", "int8", "int4"):
        return WeightScheme(config.dtype)
    return stored_scheme(shape) if config.dtype == "auto" and shape.quantized else WeightScheme.BFLOAT16


def _context_limit(config: PlanConfig, shape: ModelShape) -> int:
    """Return tokens of the longest sequence that the model knows, or is asked to go to beyond that."""
    limit, wanted = shape.max_position or config.max_model_len or _DEFAULT_CONTEXT, config.max_model_len
    if wanted is None or wanted <= limit:
        return limit
    if not config.allow_long_max_model_len:
        raise ValueError(
            f"max-model-len {wanted} exceeds the model's context of {limit} tokens: lower it, or set "
            "allow-long-max-model-len"
        )
    return wanted


def _card(config: PlanConfig) -> Card:
    known = CARDS.get(config.device) or Card("custom", 0.0, 0.0, 0.0, 0.0, fp8_max=448)
    return replace(
        known,
        memory_gib=known.memory_gib if config.device_memory_gib is None else config.device_memory_gib,
        bytes_per_second=known.bytes_per_second if config.memory_tb_s is None else config.memory_tb_s * 1e12,
        flops_per_second=known.flops_per_second
        if config.compute_tflops is None
        else config.compute_tflops * 1e12,
    )


def _peak(shape: ModelShape, heads: int, kv_heads: int, plan: BucketPlan, limits: BucketLimits) -> int:
    figures = ModelFigures(
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        heads=heads,
        kv_bytes_per_token=shape.kv_values_of(kv_heads, heads) * 2,
        item_size=2,
    )
    size = limits.block_size
    return estimate_activations(
        figures,
        max(plan.prefill, key=lambda bucket: bucket.prefill_tokens(size)),
        max(plan.decode, key=lambda bucket: bucket.context_blocks),
        block_size=size,
        rows=limits.max_num_seqs,
    )


def _rules(
    config: PlanConfig, shape: ModelShape, card: Card, limits: BucketLimits, memory: MemoryPlan
) -> Autocalc | None:
    """Return the choice of vLLM's container, if it knows the card and finds room."""
    if card.name not in CARDS or memory.weights == 0:
        return None
    try:
        return autocalc(
            AutocalcInputs(
                device_gib=card.nominal_gb,
                weights_gib=memory.weights * config.tensor_parallel_size / GIB,
                layers=shape.layers,
                head_dim=shape.head_dim,
                kv_heads=shape.kv_heads,
                max_model_len=limits.max_model_len,
                tensor_parallel_size=config.tensor_parallel_size,
                kv_bytes=1 if config.kv_cache_dtype == "fp8" else 2,
                block_size=limits.block_size,
                exponential=long_name(config.bucketing_strategy) == "exponential",
                contiguous=config.contiguous_kv,
            )
        )
    except ValueError:
        return None
