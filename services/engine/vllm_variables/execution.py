"""Variables of warm-up, execution, logs and profiles."""

from __future__ import annotations

import re

from catenary.config import ConfigError
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
_LEVELS = {
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "warn": "warning",
    "error": "error",
    "critical": "error",
}
_TRACE = "server_events.json"


def _translate_warm_up(variables: Variables) -> None:
    skip, full = variables.boolean("VLLM_SKIP_WARMUP"), variables.boolean("VLLM_FULL_WARMUP")
    if full:
        variables.give("warmup", "full", "VLLM_FULL_WARMUP")
        if not skip:
            variables.warn(
                "VLLM_FULL_WARMUP: a shape that was not warmed up is counted and named in the log, where "
                "vLLM would end the engine"
            )
    if skip:
        if full:
            variables.warn("VLLM_FULL_WARMUP has no effect: VLLM_SKIP_WARMUP is set too and wins")
        variables.give("warmup", "skip", "VLLM_SKIP_WARMUP")


def _check_lazy_mode(variables: Variables) -> None:
    name = "PT_HPU_LAZY_MODE"
    if variables.text(name) not in (None, "0", "1"):
        raise ConfigError(f"{name} {str(variables.text(name))[:40]!r}: must be 0 or 1")


def _translate_level(variables: Variables) -> None:
    name = "VLLM_LOGGING_LEVEL"
    if (level := variables.choice(name, _LEVELS)) is not None:
        variables.give("log_level", level, name)


def _profiled_steps(variables: Variables) -> str | None:
    """Return the steps of VLLM_PROFILE_STEPS, FIRST,LAST and both of them too, as START:COUNT."""
    name = "VLLM_PROFILE_STEPS"
    if (text := variables.text(name)) is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9}) *, *([0-9]{1,9})", text)
    if match is None or int(match[2]) < int(match[1]):
        raise ConfigError(f"{name} {text[:40]!r}: must be FIRST,LAST")
    # Steps count from 1 here.
    return f"{int(match[1]) + 1}:{int(match[2]) - int(match[1]) + 1}"


def _translate_profiler(variables: Variables) -> None:
    file, steps = variables.text("VLLM_PROFILE_FILE"), _profiled_steps(variables)
    if steps is not None and "trace_steps" not in variables.own:
        variables.give("profile_steps", steps, "VLLM_PROFILE_STEPS")
        variables.give("trace_steps", file or _TRACE, "VLLM_PROFILE_STEPS")
    elif variables.boolean("VLLM_PROFILER_ENABLED"):
        variables.give("trace_steps", file or _TRACE, "VLLM_PROFILER_ENABLED")
    elif file is not None:
        variables.warn("VLLM_PROFILE_FILE has no effect: VLLM_PROFILER_ENABLED is not true")


ROWS = (
    Row(
        ("VLLM_SKIP_WARMUP",),
        Status.SUPPORTED,
        "true: `--warmup skip`. false is the default: `full` where shapes are captured or compiled",
        _translate_warm_up,
        f"{_TEST}test_warm_up_is_skipped_or_full",
    ),
    Row(
        ("VLLM_FULL_WARMUP",),
        Status.SUPPORTED,
        "true: `--warmup full`. A shape that was not warmed up is counted and named in the log; it does not "
        "end the engine",
        _translate_warm_up,
        f"{_TEST}test_warm_up_is_skipped_or_full",
    ),
    Row(
        ("PT_HPU_LAZY_MODE",),
        Status.SUPPORTED,
        "with `--enforce-eager` the four execution modes, as in vLLM; read by an engine with `--device hpu` "
        "and by the Gaudi software",
        _check_lazy_mode,
        f"{_TEST}test_lazy_mode_and_enforce_eager_choose_the_execution_mode",
    ),
    copied(
        "async_stepping",
        _COPIED,
        ": sampled tokens stay on the device and the next step is prepared meanwhile",
    ),
    Row(
        ("VLLM_LOGGING_LEVEL",),
        Status.SUPPORTED,
        "`--log-level`",
        _translate_level,
        f"{_TEST}test_logging_level",
    ),
    Row(
        ("VLLM_PROFILER_ENABLED", "VLLM_PROFILE_FILE"),
        Status.SUPPORTED,
        f"`--trace-steps`, into VLLM_PROFILE_FILE or `{_TRACE}` in the working directory: Chrome trace "
        "events",
        _translate_profiler,
        f"{_TEST}test_profiler_writes_a_trace",
    ),
    Row(
        ("VLLM_PROFILE_STEPS",),
        Status.SUPPORTED,
        "`--profile-steps` with `--trace-steps`: the file is complete after these steps",
        _translate_profiler,
        f"{_TEST}test_profiled_steps",
    ),
    passed_on(
        "read by the Gaudi software",
        "tests/unit/catenary_apps/migration/test_up.py::test_variables_reach_the_engine_as_they_are",
        "PT_HPU_ENABLE_LAZY_COLLECTIVES",
        "PT_HPU_WEIGHT_SHARING",
        "EXPERIMENTAL_WEIGHT_SHARING",
        "PT_HPUGRAPH_DISABLE_TENSOR_CACHE",
        "PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES",
        "PT_HPU_ENABLE_CACHE_METRICS",
        "PT_HPU_METRICS_*",
        "PT_HPU_H2D_TRIVIAL_SCALES_MODE",
        "PT_ENABLE_INT64_SUPPORT",
        "RUNTIME_SCALE_PATCHING",
        "FUSER_*",
        "ENABLE_EXPERIMENTAL_FLAGS",
        "ENABLE_SKIP_REMOVAL_OF_GRAPH_INPUT_IDENTITY_NODES",
        "HABANA_VISIBLE_DEVICES",
        "HABANA_VISIBLE_MODULES",
        "HLS_MODULE_ID",
        "HABANA_LOGS",
        "HABANA_PROFILE",
        "HABANA_PROFILE_*",
        "GRAPH_VISUALIZATION",
        "LOG_LEVEL_ALL",
        "LOG_LEVEL_PT_FALLBACK",
        "GLOO_SOCKET_IFNAME",
        "HCCL_SOCKET_IFNAME",
    ),
    equivalent(
        "`catenary profile` records steps of a running engine, bucket by bucket; `--trace-steps` with "
        "`--profile-steps START:COUNT` those of its start",
        "VLLM_PT_PROFILE",
        "VLLM_PROFILE_PROMPT",
        "VLLM_PROFILE_DECODE",
        "VLLM_TORCH_PROFILER_DIR",
        "VLLM_TORCH_PROFILER_*",
    ),
    unneeded("shapes are static in every mode: buckets see to that", "VLLM_T_COMPILE_DYNAMIC_SHAPES"),
    unneeded("warm-up always logs each bucket", "VLLM_DEVELOPER_MODE", "VLLM_DEBUG"),
    unneeded("prompts are never merged into one row", "VLLM_MERGED_PREFILL", "VLLM_ZERO_PADDING"),
    unneeded("duplicates at the edge of top-k are always handled", "VLLM_HANDLE_TOPK_DUPLICATES"),
    unneeded(
        "logs are one line per event on stderr; `--log-format json` makes them JSON",
        "VLLM_CONFIGURE_LOGGING",
        "VLLM_LOGGING_CONFIG_PATH",
        "VLLM_LOGGING_PREFIX",
        "VLLM_LOGGING_STREAM",
        "VLLM_LOGGING_COLOR",
    ),
    equivalent("Prometheus metrics are always there", "VLLM_LOG_STATS_INTERVAL"),
)
