"""Variables of memory, graphs and long contexts."""

from __future__ import annotations

from services.engine.vllm_variables.rows import (
    Row,
    Status,
    Variables,
    copied,
    equivalent,
    passed_on,
    unneeded,
)

_TEST = "tests/unit/engine/vllm_variables/test_engine.py::"
_COPIED = f"{_TEST}test_variable_sets_its_option"
_STRATEGIES = {"min_tokens": "min_tokens", "max_bs": "max_bs"}
CONTIGUOUS = "VLLM_CONTIGUOUS_PA"


def _translate_strategies(variables: Variables) -> None:
    for phase in ("prompt", "decode"):
        name = f"VLLM_GRAPH_{phase.upper()}_STRATEGY"
        if (value := variables.choice(name, _STRATEGIES)) is not None:
            variables.give(f"graph_{phase}_strategy", value, name)


def _translate_contiguous(variables: Variables) -> None:
    wanted = variables.boolean(CONTIGUOUS)
    if wanted is None or "contiguous_kv" in variables.own:
        return
    if wanted and "enable_prefix_caching" in variables.own:
        # Whether that is on or off, the two options then have one source.
        if str(variables.own["enable_prefix_caching"]).lower() not in ("false", "0", "no", "off"):
            variables.warn(
                f"{CONTIGUOUS} has no effect: the option enable_prefix_caching excludes it and wins"
            )
            return
    elif wanted:
        variables.give("enable_prefix_caching", False, CONTIGUOUS)
    variables.give("contiguous_kv", wanted, CONTIGUOUS)


ROWS = (
    copied(
        "graph_reserved_mem",
        f"{_TEST}test_graph_reserve_leaves_less_for_kv",
        ": until a start has measured what graphs take",
    ),
    copied("graph_prompt_ratio", _COPIED),
    Row(
        ("VLLM_GRAPH_PROMPT_STRATEGY", "VLLM_GRAPH_DECODE_STRATEGY"),
        Status.SUPPORTED,
        "`--graph-prompt-strategy`, `--graph-decode-strategy`: `min_tokens` or `max_bs`",
        _translate_strategies,
        f"{_TEST}test_graph_strategies_order_the_captures",
    ),
    copied("gpu_memory_utilization", _COPIED),
    copied("max_capture_tokens", _COPIED),
    Row(
        (CONTIGUOUS,),
        Status.SUPPORTED,
        "`--contiguous-kv`; true switches prefix caching off, as in vLLM",
        _translate_contiguous,
        f"{_TEST}test_contiguous_pa_switches_prefix_caching_off",
    ),
    equivalent(
        "defragmentation runs whenever `--contiguous-kv` is on, up to `--max-block-moves` blocks a step",
        "VLLM_DEFRAG",
        "VLLM_DEFRAG_THRESHOLD",
        "VLLM_DEFRAG_WITH_GRAPHS",
    ),
    copied(
        "stall_limit_s",
        _COPIED,
        ": an engine without a step for so long reports STALLED and is not killed",
    ),
    copied(
        "allow_long_max_model_len",
        "tests/unit/engine/core/test_long_context.py::test_model_goes_beyond_its_context_where_that_is_allowed",
        " of the engine, where the model's positions can be computed",
    ),
    unneeded(
        "no call between processes waits for a step: heartbeats go on while a shape compiles",
        "VLLM_RPC_TIMEOUT",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        "VLLM_RPC_BASE_PATH",
    ),
    passed_on(
        "read by the Gaudi software",
        "tests/unit/catenary_apps/migration/test_up.py::test_variables_reach_the_engine_as_they_are",
        "PT_HPU_SDPA_QKV_SLICE_MODE_FWD",
        "PT_HPU_SDPA_BC_FACTOR",
        "PT_HPU_QKV_SLICE_SEQ_LEN_THLD",
        "PT_HPU_POOL_STRATEGY",
        "PT_HPU_POOL_MEM_ACQUIRE_PERC",
        "PT_HPU_MAX_COMPOUND_OP_SIZE",
    ),
)
