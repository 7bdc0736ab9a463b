"""Variables of the attention kernels."""

from __future__ import annotations

from services.engine.vllm_variables.rows import Row, Status, equivalent
from services.engine.vllm_variables.variables import Variables

_TEST = "tests/unit/engine/test_migration_hpu.py::"
_FUSED = "VLLM_PROMPT_USE_FUSEDSDPA"
# Kernels that are off unless the device is known for them; true insists on them.
_SOFTMAX = {
    "VLLM_FUSED_BLOCK_SOFTMAX": "block_softmax",
    "VLLM_FUSED_BLOCK_SOFTMAX_ADJUSTMENT": "block_softmax_adjustment",
}
_SLICES = "VLLM_HPU_FSDPA_SLICE_"


def _translate_kernels(variables: Variables) -> None:
    switches: dict[str, str] = {}
    if variables.boolean(_FUSED) is False:
        switches[_FUSED] = "sdpa=off"
    for name, kernel in _SOFTMAX.items():
        if (wanted := variables.boolean(name)) is not None:
            switches[name] = f"{kernel}={'on' if wanted else 'off'}"
    if switches:
        variables.give("kernels", ",".join(switches.values()), ", ".join(switches))


def _translate_softmax(variables: Variables) -> None:
    name = "VLLM_FP32_SOFTMAX"
    if (wanted := variables.boolean(name)) is not None:
        variables.give("attention_softmax", "fp32" if wanted else "fast", name)


def _translate_slices(variables: Variables) -> None:
    threshold, chunk = f"{_SLICES}SEQ_LEN_THLD", f"{_SLICES}CHUNK_SIZE"
    if (text := variables.text(threshold)) is not None:
        variables.give("attention_slice_from", text, threshold)
    if (text := variables.text(chunk)) is not None:
        variables.give("attention_slice_chunk", text, chunk)
    if variables.boolean(f"{_SLICES}ENABLED") is False:
        variables.give("attention_slice_from", 0, f"{_SLICES}ENABLED")


ROWS = (
    Row(
        (_FUSED,),
        Status.SUPPORTED,
        "false: `--kernels sdpa=off`. true is what happens where the kernel is there",
        _translate_kernels,
        f"{_TEST}test_kernels_are_switched",
    ),
    Row(
        tuple(_SOFTMAX),
        Status.SUPPORTED,
        "`--kernels` with `block_softmax` and `block_softmax_adjustment`; absent, the device decides",
        _translate_kernels,
        f"{_TEST}test_kernels_are_switched",
    ),
    Row(
        ("VLLM_FP32_SOFTMAX",),
        Status.SUPPORTED,
        "`--attention-softmax`: true `fp32`, false `fast`. Absent: float32 for the family qwen2, as in "
        "vLLM's plugin",
        _translate_softmax,
        f"{_TEST}test_softmax_of_fused_attention",
    ),
    Row(
        tuple(f"{_SLICES}{name}" for name in ("ENABLED", "SEQ_LEN_THLD", "CHUNK_SIZE")),
        Status.SUPPORTED,
        "`--attention-slice-from`, 0 for never, and `--attention-slice-chunk`",
        _translate_slices,
        f"{_TEST}test_long_prompts_are_attended_in_slices",
    ),
    equivalent(
        "the way of slicing is the kernel's",
        f"{_SLICES}IMPL",
        f"{_SLICES}WITH_GRAPH_BREAKS",
        "VLLM_HPU_FSDPA_Q_TILE_ENABLE",
    ),
    equivalent(
        "the attention kernels are chosen by probing the device; `--kernels` switches single ones",
        "VLLM_PROMPT_USE_FLEX_ATTENTION",
        "VLLM_PA_SOFTMAX_IMPL",
        "VLLM_ATTENTION_BACKEND",
    ),
    equivalent("a sliding window's buckets are those of all prompts", "VLLM_FUSEDSDPA_SLIDE_THLD"),
)
