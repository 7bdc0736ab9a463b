"""Options of an engine's parts, and the facts in an option's declaration next to its type and default.

An option's type is annotated with the engines for which it changes anything (`Only`) and with vLLM's
variable of the same meaning (`Vllm`). The warning about idle options and the table of vLLM's variables read
them there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field, field_validator

from catenary.addresses import TcpAddress, parse_address
from catenary.config import Expert
from catenary.cpus import parse_binding
from catenary.devices import devices_that
from catenary.sequence_limits import BAD_WORD_TOKENS, BAD_WORDS, LOGIT_BIAS, STOP_TOKEN_IDS


@dataclass(frozen=True, slots=True)
class Vllm:
    """vLLM's environment variable with the meaning and the values of an option."""

    variable: str


@dataclass(frozen=True, slots=True)
class Only:
    """Engines for which an option changes anything: those whose `option` has one of these values.

    `or_compiled`: also those that compile the model.
    """

    option: Literal["task", "device", "role"]
    values: tuple[str, ...]
    or_compiled: bool = False


# Engines that serve documents have no KV between forwards, no buckets, no graphs and nothing to sample.
GENERATING = Only("task", ("generate",))
EMBEDDING = Only("task", ("embed",))
HANDING_ON = Only("role", ("prefill", "decode"))
ON_CPU = Only("device", ("cpu",))
ON_HOST = Only("device", devices_that(lambda kind: kind.on_host))
# Devices that record graphs, and those that record or compile them.
RECORDING = Only("device", devices_that(lambda kind: kind.records))
CAPTURING = Only("device", RECORDING.values, or_compiled=True)


class TransferOptions(BaseModel):
    """Options of engines that compute prompts for others, or generate from the KV of such prompts."""

    headings: ClassVar[Mapping[str, str]] = {
        "role": "Prefill and decode on different engines",
    }

    role: Literal["both", "prefill", "decode"] = Field(
        "both",
        description="prefill: computes long prompts and hands their KV on. decode: fetches it and generates. "
        "Either serves whole requests too where the other is missing. Not with contiguous_kv.",
    )
    kv_connector: Annotated[str, GENERATING, HANDING_ON] = Field(
        "shm",
        min_length=1,
        max_length=256,
        description="How a prefill engine sends KV: shm (engines of one host), tcp, tls (tcp under "
        "tls_cert, tls_key and tls_ca, with certificates of both sides), or MODULE:CLASS of a "
        "catenary.transfer.Connector. A decode engine fetches by shm, tcp, tls if it has these files, "
        "and the connector named here.",
    )
    kv_transfer_listen: Annotated[str, GENERATING, HANDING_ON] = Field(
        "127.0.0.1:0",
        description="HOST:PORT on which connectors tcp and tls answer (port 0: any free one). With tcp, KV "
        "crosses it in the clear: for a network of engines alone.",
    )
    kv_transfer_advertise: Annotated[str | None, GENERATING, HANDING_ON] = Field(
        None,
        description="HOST:PORT at which other hosts reach kv_transfer_listen (port 0: the one that it "
        "listens on). Absent: kv_transfer_listen.",
    )
    kv_transfer_directory: Path | None = Field(
        None,
        description="Directory that all engines of a host see: connector shm has its sockets in kv-UID "
        "there, which is for the user alone. Absent: catenary-kv-UID in the system's directory for temporary "
        "files.",
    )
    kv_transfer_timeout_s: Annotated[float, GENERATING, HANDING_ON] = Field(
        10.0,
        gt=0,
        le=600,
        description="Timeout in seconds of the transfer of one prompt's KV; the prompt is then recomputed.",
    )
    max_kv_transfers: Annotated[int, GENERATING, HANDING_ON] = Field(
        8, ge=1, le=256, description="Most prompts whose KV is sent, or fetched, at once."
    )
    kv_offer_ttl_s: Annotated[float, GENERATING, HANDING_ON] = Field(
        30.0,
        gt=0,
        le=3_600,
        description="Seconds for which a prefill engine keeps the KV of a prompt for others.",
    )
    kv_offer_share: Annotated[float, GENERATING, HANDING_ON] = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the KV blocks that such prompts may hold together, but for the latest one: the "
        "oldest go. They also go, oldest first, as soon as running sequences are short of blocks.",
    )

    @field_validator("kv_transfer_listen", "kv_transfer_advertise")
    @classmethod
    def _host_and_port(cls, value: str | None) -> str | None:
        if value is not None and not isinstance(parse_address(value), TcpAddress):
            raise ValueError(f"{value!r}: write HOST:PORT")
        return value


class ServicerOptions(BaseModel):
    """Options of the servicer: its watch over the core, its links to routers, limits of a sequence."""

    headings: ClassVar[Mapping[str, str]] = {
        "stall_limit_s": Expert("Health, connections to routers"),
        "max_stop_token_ids": Expert("Limits of requests"),
        "publish_kv": Expert("KV events"),
    }

    stall_limit_s: Annotated[float, Vllm("VLLM_ENGINE_ITERATION_TIMEOUT_S")] = Field(
        30.0,
        gt=0,
        le=86_400,
        description="Seconds without a step after which an engine that has work reports STALLED.",
    )
    kept_limit_s: float = Field(
        600.0,
        gt=0,
        le=86_400,
        description="Longest time for which a router keeps this engine from other routers, for a sequence "
        "that needs it empty, or most of it. Then its turn is over: it comes after others that want theirs. "
        "With less than the routers' longest lane_wait_s an honest one may lose its turn.",
    )
    core_restart_backoff_s: float = Field(
        1.0,
        gt=0,
        le=3_600,
        description="Seconds before a dead core is started again; doubles with each failure.",
    )
    core_restart_backoff_max_s: float = Field(30.0, gt=0, le=3_600, description="Longest such wait.")
    core_stop_s: float = Field(
        10.0, gt=0, le=600, description="Seconds that a core has to end by itself before it is killed."
    )
    attach_timeout_s: float = Field(
        10.0, gt=0, le=600, description="Seconds that a router has to answer when the engine attaches."
    )
    attach_backoff_s: float = Field(
        0.2,
        gt=0,
        le=3_600,
        description="Seconds before a lost router is dialled again; doubles with each failure.",
    )
    attach_backoff_max_s: float = Field(5.0, gt=0, le=3_600, description="Longest such wait.")
    attach_refused_backoff_s: float = Field(
        30.0,
        gt=0,
        le=86_400,
        description="Seconds before a router that refused the engine (another schema revision, a wrong "
        "secret) is dialled again.",
    )
    orphan_timeout_s: float = Field(
        60.0,
        gt=0,
        le=3_600,
        description="Seconds of a router's silence after which its sequences here are aborted, even if "
        "its lease is longer.",
    )
    max_stop_token_ids: Annotated[int, GENERATING] = Field(
        STOP_TOKEN_IDS.engine, ge=0, le=4_096, description="Most stop token ids of a sequence."
    )
    max_logit_bias: Annotated[int, GENERATING] = Field(
        LOGIT_BIAS.engine, ge=0, le=1_000_000, description="Most tokens with a logit bias in a sequence."
    )
    max_bad_words: Annotated[int, GENERATING] = Field(
        BAD_WORDS.engine, ge=0, le=100_000, description="Most bad words of a sequence."
    )
    max_bad_word_tokens: Annotated[int, GENERATING] = Field(
        BAD_WORD_TOKENS.engine, ge=1, le=4_096, description="Longest bad word in tokens."
    )
    remembered_handles: int = Field(
        16_384, ge=1, le=10_000_000, description="Ended sequences that are remembered for late aborts."
    )
    publish_kv: Annotated[bool, GENERATING] = Field(
        True,
        description="Tell routers which blocks the prefix cache holds, so that requests are placed where "
        "their prefix is cached.",
    )
    kv_publish_interval_s: Annotated[float, GENERATING] = Field(
        0.2, ge=0, le=60, description="Seconds between two messages about changes of the prefix cache."
    )
    kv_publish_queue: Annotated[int, GENERATING] = Field(
        65_536,
        ge=1,
        le=10_000_000,
        description="Changes queued for a router that does not read; beyond that it gets the whole state "
        "again.",
    )
    kv_resync_interval_s: Annotated[float, GENERATING] = Field(
        1.0,
        ge=0,
        le=3_600,
        description="Seconds between two answers to a router that asks for the whole state again.",
    )


class HpuOptions(BaseModel):
    """Options for HPUs alone, real or simulated."""

    headings: ClassVar[Mapping[str, str]] = {
        "layers_per_graph": "Gaudi",
    }

    layers_per_graph: Annotated[int, GENERATING, Vllm("VLLM_CONFIG_HIDDEN_LAYERS")] = Field(
        1,
        ge=0,
        le=4096,
        description="HPU, lazy: decoder layers between two flushes to the graph compiler. 0: no flush.",
    )
    regional_compilation: Annotated[bool, GENERATING, Vllm("VLLM_T_COMPILE_REGIONAL_COMPILATION")] = Field(
        True,
        description="HPU, compiled: each layer, norm and the head apart, so that layers share code. Off: a "
        "forward as a whole.",
    )
    compile_fullgraph: Annotated[bool, GENERATING, Vllm("VLLM_T_COMPILE_FULLGRAPH")] = Field(
        False, description="HPU, compiled: fail where the compiler would cut a region in two."
    )
    compile_only_warmup: Annotated[bool, GENERATING] = Field(
        True, description="HPU, compiled: a full warm-up compiles without running, which takes less time."
    )
    weights_load_device: Literal["device", "cpu"] = Field(
        "device",
        description="HPU: where weights are loaded to. cpu: all to host memory first, then to the device.",
    )
    recipe_cache: Path | None = Field(
        None,
        description="HPU: directory for compiled recipes, kept for the next start, one part for each release "
        "of Habana's software and rank. A local disk is best.",
    )
    recipe_cache_mib: int = Field(
        10_240, ge=1, le=16_777_216, description="HPU: size of the recipe cache in MiB."
    )
    recipe_cache_clear: bool = Field(False, description="HPU: empty the recipe cache at start.")
    gc_threshold_multiplier: Annotated[int, Vllm("VLLM_GC_THR_MULTIPLIER")] = Field(
        16, ge=1, le=10_000, description="HPU: factor of Python's garbage collection thresholds in the core."
    )
    numa_binding: bool = Field(
        True, description="HPU: keep the core on the CPUs of its card's NUMA node, where that is known."
    )
    kernels: str = Field(
        "",
        description="HPU: fused kernels to switch, such as sdpa=off,block_softmax=on. Names: sdpa, "
        "sdpa_sinks, sliced_sdpa, rms_norm, rotary, experts, block_softmax, block_softmax_adjustment, "
        "index_reduce. What is off runs in torch's own operations.",
    )
    attention_softmax: Literal["auto", "fast", "fp32"] = Field(
        "auto",
        description="HPU: attention's scores and their softmax in bfloat16 (fast), or in float32 and slower "
        "(fp32). auto: float32 for the families that need it (qwen2), else bfloat16.",
    )
    attention_slice_from: int = Field(
        8192,
        ge=0,
        le=16_777_216,
        description="HPU: keys from which on a prompt with cached context is attended in slices, which takes "
        "less memory. 0: never.",
    )
    attention_slice_chunk: int = Field(
        4096, ge=1024, le=16_777_216, description="HPU: queries and keys of such a slice, at most."
    )
    log_step_compilations: Literal["off", "new", "all"] = Field(
        "off", description="HPU: log graph compilations of steps: of those that have any, or of all."
    )
    log_step_fallbacks: Literal["off", "new", "all"] = Field(
        "off", description="HPU: log operations that ran on the CPU: of steps that have any, or of all."
    )


class GrammarOptions(BaseModel):
    """Options of constrained output: the compiler of grammars and its limits."""

    headings: ClassVar[Mapping[str, str]] = {
        "grammar_backend": Expert("Structured output"),
    }

    grammar_backend: Annotated[Literal["llguidance", "xgrammar"], GENERATING] = Field(
        "llguidance",
        description="Library that checks tokens against grammars. xgrammar is an extra, and supports "
        "fewer JSON schemas.",
    )
    grammar_threads: Annotated[int, GENERATING] = Field(
        0,
        ge=0,
        le=256,
        description="Threads that compile constraints, and as many that fill the masks of a step. 0: half of "
        "the cores, at most 8.",
    )
    grammar_queue: Annotated[int, GENERATING] = Field(
        256,
        ge=1,
        le=100_000,
        description="Sequences that may wait until their constraints are compiled; more are refused.",
    )
    grammar_timeout_s: Annotated[float, GENERATING] = Field(
        10.0,
        gt=0,
        le=3_600,
        description="Seconds after which a sequence whose constraint is still not compiled is refused.",
    )
    grammar_number_digits: Annotated[int, GENERATING] = Field(
        40,
        ge=16,
        le=1_000_000,
        description="Most digits of a number in constrained JSON, before its point and behind it, so that a "
        "model cannot write digits for ever; also of a second's fraction in texts of the formats time and "
        "date-time, and of a duration's numbers. An exponent has at most 3.",
    )
    grammar_cache: Annotated[int, GENERATING] = Field(
        128, ge=0, le=100_000, description="Compiled constraints that are kept for reuse."
    )
    grammar_cache_kib: Annotated[int, GENERATING] = Field(
        1024,
        ge=0,
        le=1 << 20,
        description="Most KiB of the texts that they were compiled from, together. What is made of a text is "
        "about a hundred times as large.",
    )


class CpuOptions(BaseModel):
    """Options for CPUs alone."""

    headings: ClassVar[Mapping[str, str]] = {
        "device_threads": "CPU",
    }

    device_threads: Annotated[int, ON_HOST] = Field(
        0,
        ge=0,
        le=1024,
        description="CPU, simulated HPU: threads of the core's forwards. 0: one for each core that it may "
        "use.",
    )
    cpu_bind: str = Field(
        "auto",
        max_length=4096,
        description="CPU: CPUs that the core's threads keep to, such as 0-7,16, one thread for each. none: "
        "wherever there is room. auto: what catenary up gives each of its engines; an engine that was "
        "started by itself is not bound.",
    )
    cpu_reserve: int | None = Field(
        None,
        ge=0,
        le=1024,
        description="CPU: cores that the core's threads leave free, unless cpu_bind or device_threads "
        "are given. Absent: none.",
    )
    cpu_slice_us: Annotated[int, GENERATING, ON_CPU] = Field(
        100,
        ge=0,
        le=100_000,
        description="CPU: time slice in microseconds that the threads of a generating model's forwards "
        "ask the system's scheduler for (Linux 6.12, at least 100): a short one lets a thread that wakes "
        "up run before other services. The share of the cores stays the same. 0: the system's slice.",
    )
    malloc: Annotated[Literal["auto", "system", "tcmalloc", "jemalloc"], ON_CPU] = Field(
        "auto",
        description="CPU: allocator that the core is started with. auto: tcmalloc or jemalloc where one is "
        "installed and LD_PRELOAD is not set.",
    )
    cpu_kernels: Literal["auto", "native", "torch"] = Field(
        "auto",
        description="CPU: what computes the decoder. native: our own kernels in C++, which the first start "
        "builds, or no start. torch: torch's operations. auto: native where there is a C++ compiler and the "
        "model is known to them (in float32 or bfloat16), and without compile. Of encoders native computes "
        "the linear layers, and auto is torch unless there is a quantization.",
    )
    cpu_kernels_compile_timeout_s: float = Field(
        180.0,
        gt=0,
        le=3600,
        description="CPU: seconds that the C++ compiler may take for one of twenty files of the kernels; "
        "then it is ended, and torch computes.",
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none",
        description="CPU: what weights are packed as when they are loaded, for less memory and more speed. "
        "int8: eight bits, a scale for each output; the inputs of a product too, a scale for each token. "
        "int4: four bits, a scale and an offset for 32 inputs of each output; the head has eight. int8 is "
        "faster but for one stream at a time on AVX-512. Of encoders the linear layers are packed.",
    )

    @field_validator("cpu_bind")
    @classmethod
    def _known_binding(cls, text: str) -> str:
        if len(parse_binding(text).lists) > 1:
            raise ValueError("an engine has one list of CPUs; catenary up takes one for each of its engines")
        return text
