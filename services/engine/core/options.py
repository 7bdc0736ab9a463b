"""The core's own view of the engine's options: those it needs, read from the JSON that the servicer sends."""

from __future__ import annotations

import msgspec


class CoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Fields carry the names, meaning and defaults of EngineConfig; what the core does not need is ignored.

    EngineConfig itself would bring gRPC into the core. The servicer sends every option, so that none needs a
    default here.
    """

    model: str
    task: str
    embedding_dimensions: str | None
    cache_dir: str | None
    convert_timeout_s: float
    max_model_len: int | None
    allow_long_max_model_len: bool
    dtype: str
    model_backend: str
    device: str
    device_threads: int
    cpu_bind: str
    cpu_reserve: int | None
    cpu_kernels: str
    cpu_kernels_compile_timeout_s: float
    cpu_slice_us: int
    quantization: str
    gpu_memory_utilization: float
    kv_cache_gib: float | None
    # 0: the device's own.
    block_size: int
    enable_prefix_caching: bool
    contiguous_kv: bool
    max_block_moves: int
    max_num_seqs: int
    max_beam_width: int
    max_waiting: int
    max_num_batched_tokens: int
    max_idle_batched_tokens: int | None
    max_prefill_batch: int | None
    priority_ageing_steps: int
    bucketing_strategy: str
    bucketing_file: str | None
    bucketing_pad_ratio: float
    bucketing_pad_max_rows: int | None
    bucketing_pad_max_tokens: int | None
    bucketing_pad_max_context: int | None
    bucketing_pad_max_blocks: int | None
    bucket_prefill_batch: str | None
    bucket_prefill_query: str | None
    bucket_prefill_context: str | None
    bucket_decode_batch: str | None
    bucket_decode_blocks: str | None
    record_lengths: str | None
    grammar_backend: str
    grammar_threads: int
    grammar_queue: int
    grammar_timeout_s: float
    grammar_cache: int
    grammar_cache_kib: int
    grammar_number_digits: int
    async_stepping: bool
    trace_steps: str | None
    profile_steps: str | None
    profile_max_events: int
    compile: bool
    enforce_eager: bool
    warmup: str | None
    graph_reserved_mem: float
    graph_prompt_ratio: float
    graph_prompt_strategy: str
    graph_decode_strategy: str
    max_capture_tokens: int | None
    layers_per_graph: int
    regional_compilation: bool
    compile_fullgraph: bool
    compile_only_warmup: bool
    weights_load_device: str
    recipe_cache: str | None
    recipe_cache_mib: int
    recipe_cache_clear: bool
    gc_threshold_multiplier: int
    numa_binding: bool
    kernels: str
    attention_softmax: str
    attention_slice_from: int
    attention_slice_chunk: int
    log_step_compilations: str
    log_step_fallbacks: str
    role: str
    kv_connector: str
    kv_transfer_listen: str
    kv_transfer_advertise: str | None
    kv_transfer_directory: str | None
    tls_cert: str | None
    tls_key: str | None
    tls_ca: str | None
    kv_transfer_timeout_s: float
    max_kv_transfers: int
    kv_offer_ttl_s: float
    kv_offer_share: float
    log_level: str
    log_format: str


def decode_options(config_json: bytes) -> CoreOptions:
    """Parses StartCore's JSON. Raises ValueError, one line, if a field is missing or of the wrong type."""
    return msgspec.json.decode(config_json, type=CoreOptions)
