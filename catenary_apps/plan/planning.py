"""Does the planning: weights, memory, KV, buckets, graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from catenary_apps.cli.model_sizes import find_shape
from catenary_apps.plan.autocalc import Autocalc, AutocalcInputs, autocalc
from catenary_apps.plan.cards import CARDS, Card
from catenary_apps.plan.choices import Choice, Subject, advise, find_choices
from catenary_apps.plan.config import PlanConfig
from catenary_apps.plan.dividing import (
    GIB,
    LEAST_RESERVE,
    MOST_RESERVE,
    DoesNotFitError,
    Loaded,
    expected_length,
    fitting_reserve,
    load,
)
from catenary_apps.plan.graphs import GraphEstimate, estimate_graphs
from services.engine.bucketing import BucketLimits, BucketPlan, build_plan
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
        """What their graphs take."""
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
    """Does all the work. Every figure is one of the settings that are recommended.

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
    """What a card leaves for KV beside the model, with the share for graphs that the search begins with.

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
    """Bytes of the weight files; 0 if there are none."""
    return 0 if directory is None else sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def _draft_of(subject: Subject) -> tuple[Loaded, Draft]:
    """The plan with the reserve that was given, or that its own graphs need. Raises DoesNotFitError."""
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
    """The draft whose graphs take the reserve that it has, of at most `most`.

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
    """How weights are kept on the card: packed ones as they are packed, others in bfloat16."""
    if config.dtype in ("fp8", "int8", "int4"):
        return WeightScheme(config.dtype)
    return stored_scheme(shape) if config.dtype == "auto" and shape.quantized else WeightScheme.BFLOAT16


def _context_limit(config: PlanConfig, shape: ModelShape) -> int:
    """Tokens of the longest sequence that the model knows, or is asked to go to beyond that."""
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
    """What vLLM's container would choose, if it knows the card and finds room."""
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
                exponential=config.bucketing_strategy in ("exponential", "exp"),
                contiguous=config.contiguous_kv,
            )
        )
    except ValueError:
        return None
