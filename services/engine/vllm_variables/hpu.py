"""Variables of the Gaudi device: recipes, compilation, garbage collection, attention, logs of steps."""

from __future__ import annotations

from catenary.config import ConfigError
from services.engine.vllm_variables.rows import Row, Status, Variables, copied, equivalent

_TEST = "tests/unit/engine/vllm_variables/test_hpu.py::"
_COPIED = f"{_TEST}test_variable_sets_its_option"
RECIPES = "PT_HPU_RECIPE_CACHE_CONFIG"
_STEP_LOGS = {
    "log_step_compilations": "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION",
    "log_step_fallbacks": "VLLM_HPU_LOG_STEP_CPU_FALLBACKS",
}
_SWITCH = {"true": True, "1": True, "false": False, "0": False, "": False}


def recipe_cache(text: str) -> tuple[str, bool, int | None]:
    """Directory, whether it is emptied at start, and MiB, of `DIRECTORY[,CLEAR[,MIB[,NFS]]]`.

    Raises ValueError. What says that the directory is on NFS is of no use: our directory is checked.
    """
    fields = [field.strip() for field in text.split(",")]
    if len(fields) > 4:
        raise ValueError("must be DIRECTORY,CLEAR,MIB")
    directory, clear, mib, nfs = fields + [""] * (4 - len(fields))
    if clear.lower() not in _SWITCH or nfs.lower() not in _SWITCH:
        raise ValueError("must be DIRECTORY,CLEAR,MIB with true or false for CLEAR")
    if mib and not (mib.isascii() and mib.isdigit() and len(mib) < 10 and int(mib) >= 1):
        raise ValueError("must be DIRECTORY,CLEAR,MIB with a whole number for MIB")
    return directory, _SWITCH[clear.lower()], int(mib) if mib else None


def _translate_recipes(variables: Variables) -> None:
    text = variables.text(RECIPES)
    if text is None:
        return
    try:
        directory, clear, mib = recipe_cache(text)
    except ValueError as error:
        raise ConfigError(f"{RECIPES} {text[:100]!r}: {error}") from None
    if not directory or "recipe_cache" in variables.own:
        return
    variables.give("recipe_cache", directory, RECIPES)
    variables.give("recipe_cache_clear", clear, RECIPES)
    if mib is not None:
        variables.give("recipe_cache_mib", mib, RECIPES)


def _translate_step_logs(variables: Variables) -> None:
    for option, name in _STEP_LOGS.items():
        for variable, value in ((name, "new"), (f"{name}_ALL", "all")):
            if variables.boolean(variable):
                variables.give(option, value, variable)


def _check_compile_only(variables: Variables) -> None:
    if variables.boolean("PT_COMPILE_ONLY_MODE"):
        raise ConfigError(
            "PT_COMPILE_ONLY_MODE: an engine would serve garbage; --compile-only-warmup is for warm-up alone"
        )


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
        (RECIPES,),
        Status.SUPPORTED,
        "`--recipe-cache`, `--recipe-cache-clear`, `--recipe-cache-mib` of the engine; each release of the "
        "Gaudi software and each rank has its own part of the directory",
        _translate_recipes,
        f"{_TEST}test_recipe_cache",
    ),
    copied("gc_threshold_multiplier", _COPIED),
    copied("layers_per_graph", _COPIED, ": decoder layers between two flushes of a lazy graph"),
    copied("regional_compilation", _COPIED),
    copied("compile_fullgraph", _COPIED),
    Row(
        tuple(name + suffix for name in _STEP_LOGS.values() for suffix in ("", "_ALL")),
        Status.SUPPORTED,
        "`--log-step-compilations`, `--log-step-fallbacks`: `new`, or `all` for `*_ALL`",
        _translate_step_logs,
        f"{_TEST}test_logs_of_steps",
    ),
    Row(
        ("PT_COMPILE_ONLY_MODE",),
        Status.REFUSED,
        "results would be garbage; `--compile-only-warmup`, on by default, compiles so during warm-up alone",
        _check_compile_only,
    ),
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
