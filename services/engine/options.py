"""Every option of an engine: name, type, default, help, and the engines for which it matters.

The servicer and the core both read this declaration, so it imports neither torch nor gRPC. Checks of options
against one another are in `config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator
from pydantic_core import from_json

from catenary.addresses import parse_address
from catenary.config import Expert, ListenOptions, ServiceConfig, settings
from catenary.devices import DeviceChoice, choose_device
from catenary.sequence_limits import BEAM_NUMBERS, BEAM_WIDTH, MAX_BEAM_WIDTH
from services.engine.bucketing import (
    AXIS_OPTIONS,
    FILE,
    STRATEGIES,
    BucketAxes,
    PaddingOptions,
    check_axes,
    long_name,
    strategy_names,
)
from services.engine.option_groups import (
    CAPTURING,
    EMBEDDING,
    GENERATING,
    RECORDING,
    CpuOptions,
    GrammarOptions,
    HpuOptions,
    Only,
    ServicerOptions,
    TransferOptions,
    Vllm,
)

if TYPE_CHECKING:
    StrategyName = str
else:
    StrategyName = Literal[strategy_names()]

_TAKEN = "; ".join(
    f"{name} takes {strategy.settings.replace('`', '')}" for name, strategy in STRATEGIES.items()
)
_PADDING_OPTIONS = (
    "bucketing_pad_ratio",
    "bucketing_pad_max_rows",
    "bucketing_pad_max_tokens",
    "bucketing_pad_max_context",
    "bucketing_pad_max_blocks",
)


class BucketingOptions(ServiceConfig):
    """Options that choose buckets: strategy, file, padding and axes, of an engine and of `catenary plan`."""

    headings: ClassVar[Mapping[str, str]] = {
        "bucketing_strategy": "Buckets",
        "bucketing_pad_max_rows": Expert("Buckets: caps of padding, settings of axes"),
    }

    bucketing_strategy: Annotated[StrategyName, GENERATING] = Field(
        "exponential", description="How the static shapes of the forwards are spaced."
    )
    bucketing_file: Annotated[Path | None, GENERATING] = Field(
        None,
        description="Bucket file for bucketing_strategy file, one (batch, query, context_blocks) a line; "
        "catenary buckets --learn writes one.",
    )
    bucketing_pad_ratio: Annotated[float, GENERATING] = Field(
        0.25, ge=0, le=0.5, description="Strategy padding: largest share of padding in a bucket."
    )
    bucketing_pad_max_rows: Annotated[int | None, GENERATING] = Field(
        None, ge=1, description="Strategy padding: most padded rows. Absent: a quarter of the maximum."
    )
    bucketing_pad_max_tokens: Annotated[int | None, GENERATING] = Field(
        None,
        ge=1,
        description="Strategy padding: most padded tokens of a row. Absent: a quarter of "
        "max_num_batched_tokens.",
    )
    bucketing_pad_max_context: Annotated[int | None, GENERATING] = Field(
        None,
        ge=1,
        description="Strategy padding: most padded context blocks of a row. Absent: a full step's.",
    )
    bucketing_pad_max_blocks: Annotated[int | None, GENERATING] = Field(
        None,
        ge=1,
        description="Strategy padding: most padded blocks of a decode batch. Absent: a quarter of the "
        "maximum.",
    )
    bucket_prefill_batch: Annotated[str | None, GENERATING] = Field(
        None,
        max_length=128,
        description="Rows of prefill buckets: min=N,step=N,max=N,pad_max=N,pad_percent=N, any of these; the "
        f"strategy sets the others. {_TAKEN}.",
    )
    bucket_prefill_query: Annotated[str | None, GENERATING] = Field(
        None,
        max_length=128,
        description="Tokens of a row of prefill buckets, as bucket_prefill_batch. Longer prompts are "
        "computed in chunks of max.",
    )
    bucket_prefill_context: Annotated[str | None, GENERATING] = Field(
        None,
        max_length=128,
        description="Context blocks of a row of prefill buckets, as bucket_prefill_batch.",
    )
    bucket_decode_batch: Annotated[str | None, GENERATING] = Field(
        None, max_length=128, description="Rows of decode buckets, as bucket_prefill_batch."
    )
    bucket_decode_blocks: Annotated[str | None, GENERATING] = Field(
        None, max_length=128, description="KV blocks of decode buckets, as bucket_prefill_batch."
    )

    def axes(self) -> BucketAxes:
        """Return the settings of the axes. Raises ValueError, one line that names the option."""
        return BucketAxes.parse({name: getattr(self, name) for name in AXIS_OPTIONS})

    def padding(self) -> PaddingOptions:
        """Return the limits of the strategy padding."""
        return PaddingOptions(
            ratio=self.bucketing_pad_ratio,
            max_rows=self.bucketing_pad_max_rows,
            max_tokens=self.bucketing_pad_max_tokens,
            max_context=self.bucketing_pad_max_context,
            max_blocks=self.bucketing_pad_max_blocks,
        )

    def check_buckets(self) -> None:
        """Refuse options of another strategy than the one chosen. Raises ValueError, one line."""
        strategy = long_name(self.bucketing_strategy)
        if (self.bucketing_file is None) is (strategy == FILE):
            raise ValueError("bucketing_strategy file and bucketing_file need each other")
        given = [name for name in _PADDING_OPTIONS if name in self.model_fields_set]
        padded = [name for name, rule in STRATEGIES.items() if rule.padded]
        if given and strategy not in padded:
            needed = " or ".join(padded)
            raise ValueError(f"{given[0]} needs bucketing_strategy {needed}, not {self.bucketing_strategy}")
        check_axes(strategy, self.axes())


class EngineOptions(
    BucketingOptions, CpuOptions, GrammarOptions, HpuOptions, ServicerOptions, TransferOptions, ListenOptions
):
    """Options of one engine, each valid by itself. The core decodes them from the servicer's JSON."""

    model_config = settings(prefix="CATENARY_ENGINE_")

    headings: ClassVar[Mapping[str, str]] = {
        "listen": "gRPC: addresses, secrets, TLS",
        "router": "Routers",
        "model": "Model and device",
        "kv_cache_gib": "KV cache",
        "max_num_seqs": "Scheduling",
        "trace_steps": "Traces and profiles",
        "compile": "Graphs and warm-up",
        "graph_reserved_mem": Expert("Graphs: shares of memory, order of capture"),
    }

    listen: tuple[str, ...] = Field(
        ("127.0.0.1:0",),
        description="Addresses of the engine's status service (port 0: any free one). Requests do not "
        "come this way: the engine connects to its routers.",
    )
    router: tuple[str, ...] = Field(
        ("127.0.0.1:7070",),
        min_length=1,
        description="Addresses of routers to attach to, all of them at once; a host name stands for all "
        "addresses that it resolves to, now and later.",
    )
    engine_name: str = Field("", max_length=128, description="Name shown to people. Empty: the host's name.")

    model: str = Field(
        "smollm2",
        min_length=1,
        description="Model: an alias (smollm2, minilm), a Hugging Face directory, a GGUF file or a hub id.",
    )
    task: Literal["auto", "generate", "embed", "score", "classify"] = Field(
        "auto",
        description="Task of the model: generate text, embed documents, score pairs, or classify texts. "
        "auto: read from the model's files. A chat model that is set to embed gives its last token's "
        "state; set to score, the probability that it answers yes and not no. Options of KV, buckets, "
        "graphs and sampling concern generating engines alone: other engines log those that they ignore.",
    )
    embedding_dimensions: Annotated[str | None, EMBEDDING] = Field(
        None,
        pattern=r"^(any|[0-9]{1,6}( *, *[0-9]{1,6}){0,63})$",
        examples=["any", "64,128,256"],
        description="Smaller widths that requests may ask for, separated by commas, or any. Absent: as "
        "in config.json (matryoshka_dimensions, is_matryoshka).",
    )
    served_model_name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Name that requests use. Absent: that of the alias, directory or file, or the hub id.",
    )
    cache_dir: Path | None = Field(
        None,
        description="Directory for converted models, compiled code and measurements. Absent: "
        "CATENARY_CACHE, or ~/.cache/catenary.",
    )
    convert_timeout_s: float = Field(
        7200,
        gt=0,
        le=86_400,
        description="Timeout in seconds of the conversion of a GGUF file, which is done once.",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Longest sequence, prompt and completion, in tokens. Absent: the model's own."
    )
    allow_long_max_model_len: Annotated[bool, GENERATING, Vllm("VLLM_ALLOW_LONG_MAX_MODEL_LEN")] = Field(
        False,
        description="Allow a max_model_len beyond the context that the model was trained for, if its "
        "positions can be computed. Text beyond that context may make no sense.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Data type of the computation. auto: the best one for the model and the device."
    )
    model_backend: Literal["auto", "decoder", "transformers"] = Field(
        "auto",
        description="Implementation of the model: our decoder, or transformers' own module. auto: the "
        "decoder if it supports all that the model's config asks for. Encoders are always transformers' "
        "own.",
    )
    device: DeviceChoice = Field(
        "auto",
        description="Device that computes. auto: hpu, cuda or cpu, by what is there. sim: an HPU simulated "
        "on the CPU that keeps its rules.",
    )

    gpu_memory_utilization: Annotated[float, GENERATING, Vllm("VLLM_GPU_MEMORY_UTILIZATION")] = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of the memory left after the weights and the largest forward to use for "
        "graphs and KV together. On a CPU, KV never gets more than 2 GiB of it.",
    )
    kv_cache_gib: Annotated[float | None, GENERATING] = Field(
        None,
        gt=0,
        le=1_048_576,
        description="Size of the KV pool in GiB. Absent: what gpu_memory_utilization leaves.",
    )
    block_size: Annotated[int | None, GENERATING] = Field(
        None, ge=1, le=1024, description="Tokens of one KV block. Absent: 128 on an HPU, 32 elsewhere."
    )
    enable_prefix_caching: Annotated[bool, GENERATING] = Field(
        True,
        description="Keep the KV of full blocks for prompts with the same beginning, while there is memory.",
    )
    contiguous_kv: Annotated[bool, GENERATING] = Field(
        False,
        description="Decode fetches KV as one slice from the start of the cache, kept dense by "
        "defragmentation, instead of by block id. Needs enable_prefix_caching off.",
    )
    max_block_moves: Annotated[int, GENERATING] = Field(
        32, ge=1, le=65_536, description="With contiguous_kv: blocks that defragmentation moves in one step."
    )
    max_num_seqs: Annotated[int, GENERATING] = Field(
        32, ge=1, le=4096, description="Sequences that run at once."
    )
    max_beam_width: Annotated[int, GENERATING] = Field(
        BEAM_WIDTH.engine,
        ge=0,
        le=MAX_BEAM_WIDTH,
        description="Most beams of one beam search. 0: beam search is refused, as with contiguous_kv.",
    )
    max_beam_numbers: Annotated[int, GENERATING] = Field(
        BEAM_NUMBERS.engine,
        ge=1,
        le=1 << 22,
        description="Most tokens, log probabilities and alternatives of all hypotheses of one beam "
        "search together.",
    )
    max_waiting: int = Field(
        256, ge=0, le=1_000_000, description="Sequences that may wait beyond those; more are refused."
    )
    max_num_batched_tokens: int = Field(
        512, ge=1, le=1_048_576, description="Tokens of one step, prefill and decode together."
    )
    max_idle_batched_tokens: Annotated[int | None, GENERATING] = Field(
        None,
        ge=1,
        le=1_048_576,
        description="Tokens of a step in which nothing decodes: a prompt that comes alone is computed in "
        "fewer chunks, and requests that come meanwhile wait longer. Absent: twice "
        "max_num_batched_tokens where native kernels compute (without a bucket file), "
        "max_num_batched_tokens elsewhere.",
    )
    max_prefill_batch: Annotated[int | None, GENERATING] = Field(
        None,
        ge=1,
        le=256,
        description="Sequences whose prompts are computed together in one forward. Absent: 16 where native "
        "kernels compute, 4 elsewhere.",
    )
    priority_ageing_steps: int = Field(
        256,
        ge=1,
        le=1_000_000,
        description="Steps of waiting that raise a sequence by one level of priority, so that none starves.",
    )
    record_lengths: Annotated[Path | None, GENERATING] = Field(
        None,
        description="File to append the lengths of served sequences and the times of steps to, up to 64 MiB, "
        "for catenary buckets --lengths. It holds no text and no tokens.",
    )

    async_stepping: Annotated[bool, GENERATING, Vllm("VLLM_DELAYED_SAMPLING")] = Field(
        True,
        description="Plan and prepare the next step while the device computes this one. Off: one after the "
        "other, with the same results.",
    )
    trace_steps: Path | None = Field(
        None,
        description="File to trace all steps into, as Chrome trace events (chrome://tracing, Perfetto). "
        "It grows as long as the engine runs.",
    )
    profile_steps: str | None = Field(
        None,
        pattern=r"^[1-9]\d{0,8}:[1-9]\d{0,8}$",
        examples=["5:10"],
        description="With trace_steps: write COUNT steps from the START-th on (START:COUNT) and complete the "
        "file. Steps count from 1 at the core's start.",
    )
    profile_max_events: int = Field(
        200_000,
        ge=100,
        le=10_000_000,
        description="Most events of a profile (catenary profile), which counts the events beyond. An "
        "event takes about 1 KiB of memory until the profile ends.",
    )

    compile: Annotated[bool, GENERATING] = Field(
        False,
        description="Compile the model's layers for each bucket with torch.compile (on a CPU: inductor, "
        "which needs a C++ compiler). The compiled code is kept in the cache directory.",
    )
    enforce_eager: bool = Field(
        False, description="Capture and compile nothing. Excludes compile; a CPU does neither by default."
    )
    warmup: Literal["full", "background", "skip"] | None = Field(
        None,
        description="full: run every bucket before serving. background: serve at once, and capture buckets "
        "between steps. skip: capture each when it is first needed. Absent: full where buckets are captured "
        "or compiled, else skip.",
    )
    graph_reserved_mem: Annotated[float, GENERATING, RECORDING, Vllm("VLLM_GRAPH_RESERVED_MEM")] = Field(
        0.1,
        ge=0,
        lt=1,
        description="Share of the usable memory that is set aside for graphs until a run has measured them. "
        "This, graph_prompt_ratio and max_capture_tokens concern devices that record graphs: a CPU does not.",
    )
    graph_prompt_ratio: Annotated[float, GENERATING, RECORDING, Vllm("VLLM_GRAPH_PROMPT_RATIO")] = Field(
        0.3, ge=0, le=1, description="Share of the graph memory that prefill graphs get first."
    )
    graph_prompt_strategy: Annotated[
        Literal["min_tokens", "max_bs", "largest_first"], GENERATING, CAPTURING
    ] = Field("min_tokens", description="Order in which prefill buckets are captured.")
    graph_decode_strategy: Annotated[
        Literal["min_tokens", "max_bs", "largest_first"], GENERATING, CAPTURING
    ] = Field("max_bs", description="Order in which decode buckets are captured.")
    max_capture_tokens: Annotated[int | None, GENERATING, RECORDING, Vllm("VLLM_MAX_SEQ_LEN_TO_CAPTURE")] = (
        Field(
            None,
            ge=1,
            description="Prefills with more tokens, context included, run without a graph. Absent: "
            "max_num_batched_tokens.",
        )
    )

    @classmethod
    def decode(cls, config_json: bytes) -> Self:
        """Parse the JSON of a whole configuration. Raises ValueError if an option is missing or wrong."""
        given = from_json(config_json)
        if missing := sorted(cls.model_fields.keys() - given.keys()):
            raise ValueError(f"options are missing: {', '.join(missing)}")
        # Options of a subclass are for its own process.
        return cls(**{name: given[name] for name in cls.model_fields})

    @field_validator("device")
    @classmethod
    def _choose_device(cls, device: str) -> str:
        return choose_device() if device == "auto" else device

    @field_validator("router")
    @classmethod
    def _routers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            parse_address(text)
        return value


def vllm_variable(option: str) -> str:
    """Return vLLM's variable of the same meaning, by its option. Raises LookupError if there is none."""
    for fact in EngineOptions.model_fields[option].metadata:
        if isinstance(fact, Vllm):
            return fact.variable
    raise LookupError(option)


def idle_options(options: EngineOptions, task: str) -> list[str]:
    """Return the names of given options that change nothing for this engine, sorted.

    An engine names them in its log, since variables are set for all engines of a machine alike. Options that
    would promise something are refused instead. `task`: the model's, once it is known.
    """
    own = {"task": task, "device": options.device, "role": options.role}

    def matters(limit: Only) -> bool:
        return own[limit.option] in limit.values or (limit.or_compiled and options.compile)

    return sorted(
        name
        for name, field in EngineOptions.model_fields.items()
        if getattr(options, name) != field.default
        and not all(matters(fact) for fact in field.metadata if isinstance(fact, Only))
    )
