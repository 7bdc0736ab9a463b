"""Variables for which there is nothing to do here, by reason."""

from __future__ import annotations

from catenary.config import ConfigError
from services.engine.vllm_variables.rows import Row, Status, Variables, equivalent, unneeded

# What would switch on something that is not done, by what it is and what to do instead.
_FP8 = "FP8 is not done yet", "to compute in bfloat16"
_CARDS = (
    "an engine on several cards is not done yet",
    "to serve on one; catenary up --engines N makes several",
)
_TURNED_ON = {
    "QUANT_CONFIG": _FP8,
    "VLLM_REQUANT_FP8_INC": _FP8,
    "VLLM_DYNAMIC_KV_QUANT": ("KV in FP8 is not done yet", "to keep it in bfloat16"),
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": ("LoRA adapters are not done yet", "to serve the model itself"),
    "VLLM_EP_SIZE": _CARDS,
    "VLLM_DP_SIZE": _CARDS,
}
_NUMBERS = ("VLLM_EP_SIZE", "VLLM_DP_SIZE")


def _refuse_what_is_not_done(variables: Variables) -> None:
    for name, (reason, effect) in _TURNED_ON.items():
        if name == "QUANT_CONFIG":
            on = variables.text(name) is not None
        elif name in _NUMBERS:
            on = (variables.integer(name) or 0) > 1
        else:
            on = bool(variables.boolean(name))
        if on:
            raise ConfigError(f"{name}: {reason}; unset it {effect}")


ROWS = (
    equivalent("`--device hpu`", "VLLM_TARGET_DEVICE", "VLLM_PLATFORM"),
    unneeded(
        "there is one engine, and its core is always a process of its own, started with spawn",
        "VLLM_USE_V1",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_WORKER_MULTIPROC_METHOD",
        "VLLM_ENABLE_EXPERIMENTAL_FLAGS",
        "VLLM_PLUGINS",
        "VLLM_V1_*",
        "VLLM_USE_RAY_*",
        "VLLM_RAY_*",
        "RAY_IGNORE_UNHANDLED_ERRORS",
    ),
    unneeded(
        "weights are copied one by one and none is held twice",
        "VLLM_WEIGHT_LOAD_FORCE_SYNC",
    ),
    unneeded(
        "an engine has one card so far, and servers are apart from one another",
        "HCCL_COMM_ID",
        "LIBFABRIC_ROOT",
        "VLLM_ROW_PARALLEL_CHUNKS",
        "VLLM_ROW_PARALLEL_CHUNK_THRESHOLD",
        "VLLM_DP_*",
        "VLLM_PP_LAYER_PARTITION",
        "VLLM_SKIP_P2P_CHECK",
        "VLLM_PARALLEL_COMPILATION_*",
    ),
    Row(
        tuple(_TURNED_ON),
        Status.REFUSED,
        "refused if it is on, since an engine without it is not what was asked for: FP8 with INC, FP8 KV, "
        "adapters and engines on several cards are not done yet. The line says what to unset",
        _refuse_what_is_not_done,
    ),
    unneeded(
        "they matter for quantized models alone, which are refused so far",
        "INC_MEASUREMENT_DUMP_PATH_PREFIX",
        "INC_FORCE_NAIVE_SCALING",
        "VLLM_ENABLE_RUNTIME_DEQUANT",
        "VLLM_SCALE_ADJUSTMENT",
        "VLLM_HPU_FORCE_CHANNEL_FP8",
        "VLLM_HPU_CONVERT_TO_FP8UZ",
        "VLLM_HPU_MARK_SCALES_AS_CONST",
        "VLLM_DISABLE_MARK_SCALES_AS_CONST",
        "VLLM_DMOE_DYNAMIC_SCALE",
    ),
    unneeded(
        "experts are computed by one operator over all of them",
        "VLLM_MOE_*",
        "VLLM_SUPPORT_MOE_CHUNK",
        "PT_HPU_MOE_*",
        "MAX_EXPERTS_PER_SLICE",
    ),
    unneeded("latent attention has no kernels of its own here", "VLLM_MLA_*"),
    unneeded(
        "images, video and audio are refused so far",
        "VLLM_MULTIMODAL_*",
        "VLLM_MM_*",
        "VLLM_IMAGE_FETCH_TIMEOUT",
        "VLLM_VIDEO_*",
        "VLLM_AUDIO_*",
        "VLLM_ENABLE_ASYNC_MM_PREPROCESS",
        "VLLM_MAX_CONCURRENT_PREPROC",
    ),
    unneeded(
        "KV goes between a prefill and a decode engine through Catenary's own connector: `--role` and "
        "`--kv-connector` of the engine, `--engine-roles` of `catenary up`",
        "VLLM_HPU_NIXL_*",
        "VLLM_NIXL_*",
        "VLLM_HPU_HETERO_KV_LAYOUT",
        "VLLM_KV_*",
        "VLLM_MOONCAKE_*",
    ),
    unneeded("state-space models are refused so far", "VLLM_COMPACT_GDN", "VLLM_USE_HYBRID_CACHE"),
    unneeded("ALiBi's biases are always float32", "VLLM_ALIBI_USE_FLOAT32_BIASES"),
    unneeded("LoRA adapters are refused so far", "VLLM_LORA_*"),
    unneeded(
        "that attention was an experiment, which vLLM has removed",
        "VLLM_UNIFIED_ATTN",
        "VLLM_UNIFIED_ATTENTION_*",
    ),
    unneeded(
        "it concerns another kind of device",
        "VLLM_TPU_*",
        "VLLM_XLA_*",
        "VLLM_ROCM_*",
        "VLLM_NEURON_*",
        "VLLM_FLASH_ATTN_*",
        "VLLM_FLASHINFER_*",
        "VLLM_USE_FLASHINFER_*",
        "VLLM_USE_TRITON_*",
        "VLLM_USE_DEEP_GEMM",
        "VLLM_DEEP*",
        "VLLM_NCCL_*",
        "VLLM_PYNCCL_*",
        "VLLM_ALLREDUCE_*",
        "VLLM_CUDART_SO_PATH",
    ),
)
