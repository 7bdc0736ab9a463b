"""Every option of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, field_serializer, field_validator, model_validator

from catenary.config import settings
from catenary.devices import choose_device
from catenary.rpc import RpcConfig, TlsFiles, parse_address
from catenary.schema import MAX_BEAM_WIDTH
from services.engine.bucketing_options import BucketingOptions
from services.engine.cpu_options import CpuOptions
from services.engine.grammar_options import GrammarOptions
from services.engine.hpu_options import HpuOptions
from services.engine.servicer_options import ServicerOptions
from services.engine.transfer_options import TransferOptions


class EngineConfig(
    BucketingOptions, CpuOptions, GrammarOptions, HpuOptions, ServicerOptions, TransferOptions, RpcConfig
):
    """Options of `python -m services.engine`: flags, CATENARY_ENGINE_* variables, a YAML file, defaults."""

    model_config = settings(prefix="CATENARY_ENGINE_")

    headings: ClassVar[Mapping[str, str]] = {
        "listen": "gRPC: addresses, secrets, TLS",
        "router": "Routers",
        "model": "Model and device",
        "kv_cache_gib": "KV cache",
        "max_num_seqs": "Scheduling",
        "trace_steps": "Traces and profiles",
        "compile": "Graphs and warm-up",
    }

    listen: tuple[str, ...] = Field(
        ("127.0.0.1:0",),
        description="Addresses of the engine's status service (port 0: any free one). Sequences do not come "
        "this way: the engine dials its routers.",
    )
    router: tuple[str, ...] = Field(
        ("127.0.0.1:7070",),
        min_length=1,
        description="Routers to attach to, all of them at once; of a host name, all "
        "addresses that it stands for, looked up for life.",
    )
    engine_name: str = Field("", max_length=128, description="Name for people. Empty: the host's name.")

    model: str = Field(
        "smollm2",
        min_length=1,
        description="Model: an alias (smollm2, minilm), a Hugging Face directory, a GGUF file or a hub id.",
    )
    task: Literal["auto", "generate", "embed", "score", "classify"] = Field(
        "auto",
        description="What the model is served for: generated text, vectors of documents, scores of pairs, or "
        "classes of texts. "
        "auto: what its files say. A chat model that is told to embed gives its last token's state; told to "
        "score, the probability that it answers yes and not no. Options of KV, buckets, graphs and sampling "
        "concern generating engines alone: the log of others names those that they were given.",
    )
    embedding_dimensions: str | None = Field(
        None,
        pattern=r"^(any|[0-9]{1,6}( *, *[0-9]{1,6}){0,63})$",
        examples=["any", "64,128,256"],
        description="Smaller widths that requests may ask for, with commas, or any. Absent: what config.json "
        "says of them (matryoshka_dimensions, is_matryoshka).",
    )
    served_model_name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Name that requests use. Absent: that of the alias, directory or file, or the hub id.",
    )
    cache_dir: Path | None = Field(
        None,
        description="Converted models, compiled code and measurements are kept here. Absent: CATENARY_CACHE, "
        "or ~/.cache/catenary.",
    )
    convert_timeout_s: float = Field(
        7200, gt=0, le=86_400, description="Seconds that converting a GGUF file, once, may take."
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Longest sequence, prompt and completion, in tokens. Absent: the model's own."
    )
    allow_long_max_model_len: bool = Field(
        False,
        description="Take a max_model_len beyond the context that the model was trained for, where its "
        "positions can be computed. What it writes there may make no sense.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Computation type. auto: what the model and the device are best at."
    )
    model_backend: Literal["auto", "decoder", "transformers"] = Field(
        "auto",
        description="What computes the model: our decoder, or transformers' own module. auto: the decoder "
        "where it knows everything that the model's config asks for. Encoders are transformers' own.",
    )
    device: Literal["auto", "cpu", "cuda", "hpu", "sim"] = Field(
        "auto",
        description="Device that computes. auto: hpu, cuda or cpu, by what is there. sim: an HPU simulated "
        "on the CPU that keeps its rules.",
    )

    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of the memory that is free beside the weights and the largest forward, for graphs "
        "and KV together. On a CPU KV gets never more than 2 GiB of it.",
    )
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        le=1_048_576,
        description="Size of the KV pool in GiB. Absent: what gpu_memory_utilization leaves.",
    )
    block_size: int | None = Field(
        None, ge=1, le=1024, description="Tokens of one KV block. Absent: 128 on an HPU, 32 elsewhere."
    )
    enable_prefix_caching: bool = Field(
        True, description="Keep the KV of full blocks for other prompts that begin alike, as memory allows."
    )
    contiguous_kv: bool = Field(
        False,
        description="Decode fetches KV as one slice from the start of the cache, kept dense by "
        "defragmentation, instead of by block id. Needs enable_prefix_caching off.",
    )
    max_block_moves: int = Field(
        32, ge=1, le=65_536, description="With contiguous_kv: blocks that defragmentation moves in one step."
    )
    max_num_seqs: int = Field(32, ge=1, le=4096, description="Sequences that run at once.")
    max_beam_width: int = Field(
        8,
        ge=0,
        le=MAX_BEAM_WIDTH,
        description="Beams of one beam search at the most. 0: none is taken, as with contiguous_kv.",
    )
    max_beam_numbers: int = Field(
        1 << 20,
        ge=1,
        le=1 << 22,
        description="Tokens, log probabilities and alternatives that the hypotheses of one beam search can "
        "come to at the most.",
    )
    max_waiting: int = Field(
        256, ge=0, le=1_000_000, description="Sequences that may wait beyond those; more are refused."
    )
    max_num_batched_tokens: int = Field(
        512, ge=1, le=1_048_576, description="Tokens of one step, prefill and decode together."
    )
    max_idle_batched_tokens: int | None = Field(
        None,
        ge=1,
        le=1_048_576,
        description="Tokens of a step in which nothing decodes: a prompt that comes alone is computed in "
        "fewer pieces, and who comes meanwhile waits longer. Absent: twice max_num_batched_tokens where "
        "native kernels compute (without a bucket file), max_num_batched_tokens elsewhere.",
    )
    max_prefill_batch: int | None = Field(
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
        description="Steps of waiting that weigh as much as one level of priority, so that nobody starves.",
    )
    record_lengths: Path | None = Field(
        None,
        description="File to append the lengths of served sequences and the times of steps to, up to 64 MiB, "
        "for catenary buckets --lengths. It holds no text and no tokens.",
    )

    async_stepping: bool = Field(
        True,
        description="Plan and prepare the next step while the device computes this one. Off: one after the "
        "other, with the same results.",
    )
    trace_steps: Path | None = Field(
        None,
        description="Write what every step does when to this file, as Chrome trace events "
        "(chrome://tracing, Perfetto). It grows as long as the engine runs.",
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
        description="Events that a profile (catenary profile) keeps; it says how many more there were. One "
        "takes about 1 KiB of memory until the profile ends.",
    )

    compile: bool = Field(
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
    graph_reserved_mem: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Share of the usable memory that is set aside for graphs until a run has measured them. "
        "This, graph_prompt_ratio and max_capture_tokens concern devices that record graphs: a CPU does not.",
    )
    graph_prompt_ratio: float = Field(
        0.3, ge=0, le=1, description="Share of the graph memory that prefill graphs get first."
    )
    graph_prompt_strategy: Literal["min_tokens", "max_bs", "largest_first"] = Field(
        "min_tokens", description="Which prefill buckets are captured first."
    )
    graph_decode_strategy: Literal["min_tokens", "max_bs", "largest_first"] = Field(
        "max_bs", description="Which decode buckets are captured first."
    )
    max_capture_tokens: int | None = Field(
        None,
        ge=1,
        description="Prefills with more tokens, context included, run without a graph. Absent: "
        "max_num_batched_tokens.",
    )

    def tls(self) -> TlsFiles | None:
        """The TLS files of the status service: none without a certificate, for then they are for dialling."""
        if self.tls_cert is None and self.tls_key is None and not self.tls_require_client_cert:
            return None
        return super().tls()

    def router_tls(self) -> TlsFiles | None:
        """The TLS files for dialling routers."""
        return super().tls()

    @model_validator(mode="after")
    def _a_step_holds_all_that_run(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence gets a token in a step"
            )
        return self

    @model_validator(mode="after")
    def _an_idle_step_is_no_smaller(self) -> Self:
        idle = self.max_idle_batched_tokens
        if idle is not None and idle < self.max_num_batched_tokens:
            raise ValueError(
                f"max_idle_batched_tokens ({idle}) must be at least max_num_batched_tokens "
                f"({self.max_num_batched_tokens})"
            )
        return self

    @model_validator(mode="after")
    def _steps_are_traced_into_a_file(self) -> Self:
        if self.profile_steps is not None and self.trace_steps is None:
            raise ValueError("profile_steps needs trace_steps, the file that they are written to")
        return self

    @model_validator(mode="after")
    def _certificates_for_kv(self) -> Self:
        if self.kv_connector == "tls" and None in (self.tls_cert, self.tls_key, self.tls_ca):
            raise ValueError("kv_connector tls needs tls_cert, tls_key and tls_ca")
        return self

    @model_validator(mode="after")
    def _waiting_for_kv_is_no_stall(self) -> Self:
        if self.role == "decode" and self.kv_transfer_timeout_s + 2 > self.stall_limit_s:
            raise ValueError(
                f"kv_transfer_timeout_s ({self.kv_transfer_timeout_s:g}) must be 2 s below stall_limit_s "
                f"({self.stall_limit_s:g}), and below stall_s of the routers: an engine whose sequences wait "
                "for KV makes no step"
            )
        return self

    @field_validator("device")
    @classmethod
    def _the_device_is_one(cls, device: str) -> str:
        return choose_device() if device == "auto" else device

    @model_validator(mode="after")
    def _one_way_to_execute(self) -> Self:
        if self.compile and self.enforce_eager:
            raise ValueError("compile and enforce-eager exclude each other: choose one")
        return self

    @model_validator(mode="after")
    def _native_kernels_are_a_cpus(self) -> Self:
        if self.device != "cpu" and self.quantization != "none":
            raise ValueError(f"quantization {self.quantization} is for device cpu, not {self.device}")
        if self.device != "cpu" and self.cpu_kernels == "native":
            raise ValueError(f"cpu-kernels native is for device cpu, not {self.device}")
        if self.cpu_kernels == "torch" and self.quantization != "none":
            raise ValueError(f"quantization {self.quantization} excludes cpu-kernels torch")
        if self.compile and (self.quantization != "none" or self.cpu_kernels == "native"):
            raise ValueError("compile excludes quantization and cpu-kernels native: torch computes then")
        return self

    @model_validator(mode="after")
    def _one_way_to_fetch(self) -> Self:
        if self.contiguous_kv and self.enable_prefix_caching:
            raise ValueError(
                "contiguous-kv excludes enable-prefix-caching, whose blocks are fetched by id: switch one off"
            )
        return self

    @model_validator(mode="after")
    def _blocks_stay_where_they_are(self) -> Self:
        if self.contiguous_kv and self.role != "both":
            raise ValueError(f"contiguous-kv moves blocks, which role {self.role} hands on: use role both")
        return self

    @field_serializer("block_size")
    def _number_for_the_core(self, value: int | None) -> int:
        return value or 0

    @field_validator("router")
    @classmethod
    def _routers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            parse_address(text)
        return value
