"""Options that change nothing for some engines: by what the model is served for, the device and the role.

Options that would promise something are refused instead, by the configuration or by whoever opens the model.
The engine says which of the given ones are idle, since variables are for all engines of a machine alike.
"""

from __future__ import annotations

from catenary.config import ServiceConfig
from services.engine.bucketing_options import BucketingOptions
from services.engine.config import EngineConfig
from services.engine.grammar_options import GrammarOptions
from services.engine.transfer_options import TransferOptions

# Of devices that record graphs, and of those that record or compile them.
_GRAPH_MEMORY = frozenset({"graph_reserved_mem", "graph_prompt_ratio", "max_capture_tokens"})
_CAPTURE_ORDER = frozenset({"graph_prompt_strategy", "graph_decode_strategy"})
# The directory may be a volume that all containers of engines have.
_TRANSFERS = frozenset(TransferOptions.model_fields) - {"role", "kv_transfer_directory"}

# Of engines that generate. Others have no KV between forwards, no buckets, no graphs and nothing to sample.
GENERATING = (
    (frozenset(BucketingOptions.model_fields) - frozenset(ServiceConfig.model_fields))
    | frozenset(GrammarOptions.model_fields)
    | _GRAPH_MEMORY
    | _CAPTURE_ORDER
    | _TRANSFERS
    | {
        "allow_long_max_model_len",
        "async_stepping",
        "block_size",
        "compile",
        "compile_fullgraph",
        "compile_only_warmup",
        "contiguous_kv",
        "cpu_slice_us",
        "enable_prefix_caching",
        "gpu_memory_utilization",
        "kv_cache_gib",
        "kv_publish_interval_s",
        "kv_publish_queue",
        "kv_resync_interval_s",
        "layers_per_graph",
        "max_bad_word_tokens",
        "max_bad_words",
        "max_beam_numbers",
        "max_beam_width",
        "max_block_moves",
        "max_idle_batched_tokens",
        "max_logit_bias",
        "max_num_seqs",
        "max_prefill_batch",
        "max_stop_token_ids",
        "publish_kv",
        "record_lengths",
        "regional_compilation",
    }
)
EMBEDDING = frozenset({"embedding_dimensions"})
_CPU = frozenset({"malloc", "cpu_slice_us"})


def idle_options(config: EngineConfig, task: str) -> list[str]:
    """Names of the options that were given another value than their own, and change nothing.

    task: what the model turned out to be served for.
    """
    idle = frozenset[str]()
    if task != "generate":
        idle |= GENERATING
    if task != "embed":
        idle |= EMBEDDING
    if config.device == "cpu":
        idle |= _GRAPH_MEMORY if config.compile else _GRAPH_MEMORY | _CAPTURE_ORDER
    else:
        # A simulated card computes with torch's threads.
        idle |= _CPU if config.device == "sim" else _CPU | {"device_threads"}
    if config.role == "both":
        idle |= _TRANSFERS
    fields = EngineConfig.model_fields
    return sorted(name for name in idle if getattr(config, name) != fields[name].default)
