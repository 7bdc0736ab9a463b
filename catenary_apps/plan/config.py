"""The options of `catenary plan`, and the cards that they name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from catenary.config import flag_name, option_of, settings
from catenary_apps.cli.pictures import PictureFile
from services.engine.options import BucketingOptions, EngineOptions


@dataclass(frozen=True, slots=True)
class Card:
    """One accelerator.

    `memory_gib`: what its runtime reports, of `nominal_gb`; `bytes_per_second` of its memory;
    `flops_per_second` of its matrix units in bfloat16. `fp8_max`: largest FP8 number that it keeps.
    """

    name: str
    nominal_gb: float
    memory_gib: float
    bytes_per_second: float
    flops_per_second: float
    fp8_max: int


# Start-up logs of Gaudi 2 say 94.62 GiB, users' reports of Gaudi 3 say 126.
CARDS: Final = {
    "gaudi2": Card("gaudi2", 96, 94.62, 2.45e12, 432e12, fp8_max=240),
    "gaudi3": Card("gaudi3", 128, 126.0, 3.7e12, 1835e12, fp8_max=448),
}
CARDS_PER_NODE: Final = 8


_FREE_EXCLUDES = ("device_memory_gib", "weights_gib", "profile_gib")


class PlanConfig(BucketingOptions):
    """How an engine would divide a card's memory, which buckets it would have, and how long it would warm up.

    Options that an engine has too have its names. What a card would measure can be given; else it is
    estimated.
    """

    model_config = settings(prefix="CATENARY_PLAN_")

    model: str = Field(
        "smollm2",
        min_length=1,
        description="Model whose config.json gives sizes: an alias, a directory, a config.json, a GGUF file "
        "or a hub id, of which only the config is fetched.",
    )
    device: Literal["gaudi2", "gaudi3", "custom"] = Field(
        "gaudi2", description="The card. custom needs device_memory_gib, memory_tb_s and compute_tflops."
    )
    device_memory_gib: float | None = Field(
        None,
        gt=0,
        le=1_048_576,
        description="Memory of one card as its runtime reports it. Absent: 94.62 for gaudi2, 126 for gaudi3.",
    )
    memory_tb_s: float | None = Field(
        None, ge=0.0001, le=1_000_000, description="Memory bandwidth of a card in TB/s. Absent: the card's."
    )
    compute_tflops: float | None = Field(
        None,
        ge=0.0001,
        le=1_000_000_000,
        description="Matrix speed of a card in TFLOPS, bfloat16. Absent: the card's.",
    )
    tensor_parallel_size: int = Field(1, ge=1, le=1024, description="Cards that share the weights.")
    dtype: Literal["auto", "bfloat16", "float16", "float32", "fp8", "int8", "int4"] = Field(
        "auto",
        description="Data type of the weights. auto: as in a quantized checkpoint, else bfloat16. "
        "float16 and float32: bfloat16, as on the card.",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="Data type of the KV cache. auto: bfloat16."
    )

    weights_gib: float | None = Field(
        None, gt=0, le=1_048_576, description="Weights on one card, measured. Absent: from the config."
    )
    profile_gib: float | None = Field(
        None,
        ge=0,
        le=1_048_576,
        description="Activations of the largest prefill, measured by a profile run. Absent: estimated.",
    )
    free_gib: float | None = Field(
        None,
        gt=0,
        le=1_048_576,
        description="Measured memory left after weights and activations; in place of device_memory_gib, "
        "weights_gib and profile_gib.",
    )
    graph_gib: float | None = Field(
        None,
        ge=0,
        le=1_048_576,
        description="Measured memory for graphs, in place of graph_reserved_mem.",
    )
    gpu_memory_utilization: float = option_of(
        EngineOptions,
        "gpu_memory_utilization",
        description="Share of the free memory for graphs and KV together.",
    )
    graph_reserved_mem: float | None = option_of(
        EngineOptions,
        "graph_reserved_mem",
        default=None,
        description="Share of the usable memory that is set aside for graphs. Absent: as much as the plan's "
        "own graphs are expected to take, and leaves a sequence its KV.",
    )
    graph_prompt_ratio: float = option_of(EngineOptions, "graph_prompt_ratio")

    kv_cache_gib: float | None = option_of(
        EngineOptions,
        "kv_cache_gib",
        description="Size of the KV pool. Absent: what gpu_memory_utilization leaves beside the graphs.",
    )

    max_model_len: int | None = option_of(
        EngineOptions,
        "max_model_len",
        description="Longest sequence in tokens. Absent: the model's own, or what the KV holds.",
    )
    allow_long_max_model_len: bool = option_of(EngineOptions, "allow_long_max_model_len")
    expected_len: int | None = Field(
        None,
        ge=2,
        description="Tokens of an ordinary sequence, prompt and completion, that the absent max_num_seqs is "
        "chosen for. Absent: max_model_len where that is given, else 4096, or the model's context if that "
        "is less.",
    )
    max_num_seqs: int | None = option_of(
        EngineOptions,
        "max_num_seqs",
        default=None,
        description="Sequences that run at once. Absent: as many of expected_len as the KV holds, up to 256.",
    )
    max_num_batched_tokens: int = option_of(EngineOptions, "max_num_batched_tokens", default=4096)
    max_capture_tokens: int | None = Field(
        None,
        ge=1,
        le=16_777_216,
        description="Prefills of more tokens than this, context included, run without a graph. Absent: "
        "max_num_batched_tokens.",
    )
    max_prefill_batch: int = option_of(
        EngineOptions,
        "max_prefill_batch",
        default=4,
        description="Sequences whose prompts are computed together in one forward.",
    )
    block_size: int = option_of(
        EngineOptions, "block_size", default=128, description="Tokens of one KV block."
    )
    contiguous_kv: bool = option_of(
        EngineOptions,
        "contiguous_kv",
        description="Decode fetches KV as one slice from the start of the cache, without prefix caching.",
    )

    probe_timeout_s: float = Field(
        900.0,
        gt=0,
        le=604_800,
        description="Seconds that the supervisor of an engine waits for its start: a start-up probe's "
        "failureThreshold times its period.",
    )
    format: Literal["table", "json"] = Field(
        "table", description="What to print; --json is short for --format json."
    )
    plot: PictureFile | None = Field(None, description="Draw the memory into this .svg or .png file.")

    @model_validator(mode="after")
    def _a_card_is_known(self) -> Self:
        if self.device == "custom" and self.free_gib is None:
            for name in ("device_memory_gib", "memory_tb_s", "compute_tflops"):
                if getattr(self, name) is None:
                    raise ValueError(f"device custom needs {flag_name(name)}")
        if self.free_gib is not None:
            for name in _FREE_EXCLUDES:
                if getattr(self, name) is not None:
                    raise ValueError(f"--free-gib takes the place of {flag_name(name)}: give one of them")
        return self

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        self.check_buckets()
        if self.expected_len is not None and self.expected_len > (self.max_model_len or self.expected_len):
            raise ValueError(
                f"--expected-len {self.expected_len} is more than --max-model-len {self.max_model_len}"
            )
        if self.expected_len is not None and self.max_num_seqs is not None:
            raise ValueError("--expected-len chooses --max-num-seqs: give one of them")
        if self.graph_gib is not None and self.graph_reserved_mem is not None:
            raise ValueError("--graph-gib takes the place of --graph-reserved-mem: give one of them")
        if self.max_num_seqs is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence gets a token in a step"
            )
        return self
