"""The core's own view of the engine's options: those it needs, read from the JSON that the servicer sends."""

from __future__ import annotations

import msgspec


class CoreOptions(msgspec.Struct, frozen=True):
    """Fields carry the names and meaning of EngineConfig; what the core does not need is ignored."""

    model: str = "smollm2"
    cache_dir: str | None = None
    max_model_len: int | None = None
    dtype: str = "auto"
    device: str = "cpu"
    device_threads: int = 0
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float | None = None
    block_size: int = 32
    max_num_seqs: int = 32
    max_waiting: int = 256
    max_num_batched_tokens: int = 512
    max_prefill_batch: int = 4
    bucketing_strategy: str = "exponential"
    log_level: str = "info"
    log_format: str = "text"


def decode_options(config_json: bytes) -> CoreOptions:
    """Parses StartCore's JSON. Raises ValueError with one line if a field has the wrong type."""
    return msgspec.json.decode(config_json, type=CoreOptions)
