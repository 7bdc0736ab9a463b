"""The options of `catenary buckets`."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from catenary.config import ServiceConfig, expected_one_of, option_of, settings
from catenary_apps.cli.pictures import PictureFile
from catenary_apps.plan.config import PlanConfig
from services.engine.bucketing import AXIS_OPTIONS, FILE, STRATEGIES, BucketAxes, takers, vllm_names
from services.engine.options import BucketingOptions, EngineOptions

LEARNED: Final = "learned"
_NAMES: Final = (*STRATEGIES, FILE, LEARNED)


class BucketsConfig(ServiceConfig):
    """Which buckets an engine would have, what they cost, and which ones would be better.

    Options that an engine has too have its names.
    """

    model_config = settings(prefix="CATENARY_BUCKETS_")

    model: str = Field(
        "smollm2",
        min_length=1,
        description="Model whose config.json gives sizes: an alias, a Hugging Face directory, a GGUF file "
        "or a hub id.",
    )
    max_model_len: int | None = option_of(EngineOptions, "max_model_len")
    device: Literal["gaudi2", "gaudi3"] = Field(
        "gaudi2", description="The card whose memory, bandwidth and speed count where none are given."
    )
    block_size: int = option_of(PlanConfig, "block_size")
    max_num_seqs: int = option_of(EngineOptions, "max_num_seqs")
    max_num_batched_tokens: int = option_of(EngineOptions, "max_num_batched_tokens")
    max_prefill_batch: int = option_of(PlanConfig, "max_prefill_batch")
    kv_blocks: int | None = Field(
        None, ge=1, le=2**31, description="Blocks of the KV pool. Absent: what kv_cache_gib holds."
    )
    kv_cache_gib: float | None = option_of(
        EngineOptions,
        "kv_cache_gib",
        description="Size of the KV pool in GiB. Absent: what a card leaves beside the model, as catenary "
        "plan counts it.",
    )
    kv_bytes_per_token: int | None = Field(
        None, ge=1, description="KV of one token over all layers. Absent: from the model's config."
    )
    contiguous: bool = Field(
        False, description="Decode fetches the pool's first blocks and does not gather by id."
    )

    strategies: tuple[str, ...] = Field(
        (*STRATEGIES, LEARNED),
        min_length=1,
        description=f"Strategies to compare, of {', '.join(_NAMES)}.",
    )
    bucketing_file: Path | None = option_of(BucketingOptions, "bucketing_file")
    bucketing_pad_ratio: float = option_of(BucketingOptions, "bucketing_pad_ratio")
    bucket_prefill_batch: str | None = option_of(BucketingOptions, "bucket_prefill_batch")
    bucket_prefill_query: str | None = option_of(BucketingOptions, "bucket_prefill_query")
    bucket_prefill_context: str | None = option_of(BucketingOptions, "bucket_prefill_context")
    bucket_decode_batch: str | None = option_of(BucketingOptions, "bucket_decode_batch")
    bucket_decode_blocks: str | None = option_of(BucketingOptions, "bucket_decode_blocks")

    lengths: Path | None = Field(
        None,
        description="File of JSON lines with prompt_tokens and output_tokens, as an engine's "
        "--record-lengths writes it. learned learns from its first half, and all are judged by the second.",
    )
    synthetic: int | None = Field(
        None,
        ge=0,
        description="Seed of drawn chat lengths, in place of a file; judged on the next seed. Absent, "
        "without a file: 1.",
    )
    sequences: int = Field(
        1500, ge=10, le=1_000_000, description="Drawn sequences, or most sequences of a file."
    )

    max_graphs: int | None = Field(
        None, ge=2, description="Most graphs of learned. Absent: as many as exponential has."
    )
    graph_budget_gib: float | None = Field(
        None,
        gt=0,
        le=1_048_576,
        description="Memory in GiB for the graphs of learned, in place of max_graphs.",
    )
    prefill_graph_mib: float = Field(
        20.0, ge=0.001, le=1_000_000, description="Memory of an average prefill graph in MiB."
    )
    decode_graph_mib: float = Field(
        4.0, ge=0.001, le=1_000_000, description="Memory of an average decode graph in MiB."
    )
    padding_price: float = Field(
        0.1,
        ge=0,
        le=1_000,
        description="Cost of 100 % padding in learned's objective beyond the time that it takes, as a "
        "share of the phase's time.",
    )
    compiled: Path | None = Field(
        None, description="Bucket file of graphs that are compiled already; learned prefers them."
    )
    new_graph_price: float = Field(
        0.0,
        ge=0,
        le=1_000,
        description="Share of the total time that a graph which is not in compiled must save.",
    )
    learn: Path | None = Field(None, description="File to write the learned buckets to.")

    step_times: Literal["auto", "estimated", "measured"] = Field(
        "auto",
        description="Step times: measured are fitted to the length file's, estimated come from the model's "
        "size and the device. auto: measured if the file has enough.",
    )
    memory_tb_s: float | None = option_of(PlanConfig, "memory_tb_s")
    compute_tflops: float | None = option_of(PlanConfig, "compute_tflops")
    launch_ms: float = Field(0.2, ge=0, le=60_000, description="Least time of a forward in milliseconds.")

    format: Literal["table", "json"] = option_of(PlanConfig, "format")
    plot: PictureFile | None = Field(
        None, description="Draw decode steps and buckets into this .svg or .png file."
    )

    def axes(self) -> BucketAxes:
        """Return the settings of the axes. Raises ValueError, one line that names the option."""
        return BucketAxes.parse({name: getattr(self, name) for name in AXIS_OPTIONS})

    @field_validator("strategies")
    @classmethod
    def _strategies(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(vllm_names().get(name, name) for name in value))
        for name in names:
            if name not in _NAMES:
                raise ValueError(f"there is no {name!r}: {expected_one_of(name, _NAMES)}")
        return names

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence gets a token in a step"
            )
        if self.lengths is not None and self.synthetic is not None:
            raise ValueError("lengths and synthetic exclude each other")
        if self.max_graphs is not None and self.graph_budget_gib is not None:
            raise ValueError("max_graphs and graph_budget_gib exclude each other")
        if (self.bucketing_file is None) is (FILE in self.strategies):
            raise ValueError("strategy file and bucketing_file need each other")
        stepped = takers("prefill_query", "step")
        if self.axes() != BucketAxes() and not {*stepped} & {*self.strategies}:
            raise ValueError(f"the bucket options need one of the strategies {' and '.join(stepped)}")
        if LEARNED not in self.strategies and (self.learn is not None or self.compiled is not None):
            raise ValueError("learn and compiled need the strategy learned")
        if self.step_times == "measured" and self.lengths is None:
            raise ValueError("measured step times need a length file")
        return self
