"""vLLM's variables of memory, graphs, warm-up, execution and logs give the engine's options."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.engine.bucketing import Bucket
from services.engine.config import EngineConfig
from services.engine.device import ExecutionMode, execution_mode
from services.engine.graphs import CaptureOrder, Phase, shapes_in_order
from services.engine.memory import GraphReserve, plan_memory
from tests.support.moved import Moved, moved

__all__ = ["moved"]

GIB = 2**30


@pytest.mark.parametrize(
    ("variable", "text", "option", "value"),
    [
        ("VLLM_GRAPH_RESERVED_MEM", "0.4", "graph_reserved_mem", 0.4),
        ("VLLM_GRAPH_PROMPT_RATIO", "0.6", "graph_prompt_ratio", 0.6),
        ("VLLM_GPU_MEMORY_UTILIZATION", "0.85", "gpu_memory_utilization", 0.85),
        ("VLLM_MAX_SEQ_LEN_TO_CAPTURE", "8192", "max_capture_tokens", 8192),
        ("VLLM_ENGINE_ITERATION_TIMEOUT_S", "3600", "stall_limit_s", 3600.0),
        ("VLLM_DELAYED_SAMPLING", "false", "async_stepping", False),
        ("VLLM_DELAYED_SAMPLING", "True", "async_stepping", True),
    ],
)
def test_variable_sets_its_option(variable: str, text: str, option: str, value: object, moved: Moved) -> None:
    config = moved.load(**{variable: text})
    assert getattr(config, option) == value
    assert not moved.warnings
    # All else is as it would be.
    assert config == moved.load().model_copy(update={option: value})
    assert moved.refusal(**{variable: "nonsense"}).startswith(f"{variable} 'nonsense': ")


def kv_bytes(config: EngineConfig) -> int:
    return plan_memory(
        total=96 * GIB,
        weights=15 * GIB,
        free=80 * GIB,
        utilization=config.gpu_memory_utilization,
        activations=0,
        reserve=GraphReserve(config.graph_reserved_mem, None),
    ).kv


def test_graph_reserve_leaves_less_for_kv(moved: Moved) -> None:
    # 80 GiB are free and nine tenths of them usable.
    assert kv_bytes(moved.load(VLLM_GRAPH_RESERVED_MEM="0.5")) == pytest.approx(36 * GIB, abs=2)
    assert kv_bytes(moved.load()) == pytest.approx(64.8 * GIB, abs=2)
    assert moved.refusal(VLLM_GRAPH_RESERVED_MEM="1.5").startswith("VLLM_GRAPH_RESERVED_MEM '1.5': ")


def test_graph_strategies_order_the_captures(moved: Moved) -> None:
    buckets = [Bucket(1, 1, 4), Bucket(8, 1, 16), Bucket(4, 1, 64)]

    def order(**environment: str) -> list[int]:
        strategy = moved.load(**environment).graph_decode_strategy
        shapes = shapes_in_order(Phase.DECODE, buckets, CaptureOrder(strategy), 8)
        return [shape.key.batch for shape in shapes if isinstance(shape.key, Bucket)]

    assert order() == order(VLLM_GRAPH_DECODE_STRATEGY="max_bs") == [8, 4, 1]
    assert order(VLLM_GRAPH_DECODE_STRATEGY="min_tokens")[0] == 1
    assert moved.load(VLLM_GRAPH_PROMPT_STRATEGY="max_bs").graph_prompt_strategy == "max_bs"
    assert moved.refusal(VLLM_GRAPH_PROMPT_STRATEGY="best") == (
        "VLLM_GRAPH_PROMPT_STRATEGY 'best': expected min_tokens or max_bs"
    )


def test_contiguous_pa_switches_prefix_caching_off(moved: Moved) -> None:
    config = moved.load(VLLM_CONTIGUOUS_PA="true")
    assert (config.contiguous_kv, config.enable_prefix_caching) == (True, False)
    config = moved.load(VLLM_CONTIGUOUS_PA="false")
    assert (config.contiguous_kv, config.enable_prefix_caching) == (False, True)
    assert moved.load("--no-enable-prefix-caching", VLLM_CONTIGUOUS_PA="true").contiguous_kv
    # What was asked for by name stays.
    config = moved.load("--enable-prefix-caching", VLLM_CONTIGUOUS_PA="true")
    assert (config.contiguous_kv, config.enable_prefix_caching) == (False, True)
    assert moved.warnings[0].startswith("VLLM_CONTIGUOUS_PA has no effect: the option enable_prefix_caching")
    assert not moved.load("--contiguous-kv", "false", VLLM_CONTIGUOUS_PA="true").contiguous_kv


def test_warm_up_is_skipped_or_full(moved: Moved) -> None:
    assert moved.load(VLLM_SKIP_WARMUP="true").warmup == "skip"
    assert moved.load(VLLM_SKIP_WARMUP="false").warmup is None
    assert moved.load(VLLM_FULL_WARMUP="1").warmup == "full"
    (line,) = moved.warnings
    assert line.startswith("VLLM_FULL_WARMUP: a shape that was not warmed up is counted")
    assert moved.load(VLLM_FULL_WARMUP="1", VLLM_SKIP_WARMUP="1").warmup == "skip"
    assert moved.warnings == ("VLLM_FULL_WARMUP has no effect: VLLM_SKIP_WARMUP is set too and wins",)
    assert moved.load("--warmup", "background", VLLM_SKIP_WARMUP="1").warmup == "background"
    assert "must be true or false" in moved.refusal(VLLM_SKIP_WARMUP="2")


@pytest.mark.parametrize(
    ("lazy", "flags", "mode"),
    [
        ("0", (), ExecutionMode.COMPILE),
        ("0", ("--enforce-eager",), ExecutionMode.EAGER),
        ("1", (), ExecutionMode.GRAPH),
        ("1", ("--enforce-eager",), ExecutionMode.LAZY),
    ],
)
def test_lazy_mode_and_enforce_eager_choose_the_execution_mode(
    lazy: str, flags: tuple[str, ...], mode: ExecutionMode, moved: Moved
) -> None:
    config = moved.load("--device", "hpu", *flags, PT_HPU_LAZY_MODE=lazy)
    assert not moved.warnings
    chosen = execution_mode(
        config.device,
        compiled=config.compile,
        enforce_eager=config.enforce_eager,
        lazy=os.environ["PT_HPU_LAZY_MODE"],
    )
    assert chosen is mode


def test_lazy_mode_of_another_kind_is_refused(moved: Moved) -> None:
    assert moved.refusal(PT_HPU_LAZY_MODE="2") == "PT_HPU_LAZY_MODE '2': must be 0 or 1"


def test_logging_level(moved: Moved) -> None:
    assert moved.load(VLLM_LOGGING_LEVEL="DEBUG").log_level == "debug"
    assert moved.load(VLLM_LOGGING_LEVEL="CRITICAL").log_level == "error"
    assert moved.load("--log-level", "info", VLLM_LOGGING_LEVEL="DEBUG").log_level == "info"
    assert moved.refusal(VLLM_LOGGING_LEVEL="LOUD").startswith(
        "VLLM_LOGGING_LEVEL 'LOUD': expected debug, info"
    )


def test_profiler_writes_a_trace(moved: Moved) -> None:
    assert moved.load(VLLM_PROFILER_ENABLED="true").trace_steps == Path("server_events.json")
    config = moved.load(VLLM_PROFILER_ENABLED="1", VLLM_PROFILE_FILE="/tmp/t.json")
    assert config.trace_steps == Path("/tmp/t.json")
    assert moved.load(VLLM_PROFILER_ENABLED="false", VLLM_PROFILE_FILE="t").trace_steps is None
    assert moved.warnings == ("VLLM_PROFILE_FILE has no effect: VLLM_PROFILER_ENABLED is not true",)


def test_profiled_steps(moved: Moved) -> None:
    config = moved.load(VLLM_PROFILE_STEPS="0,5")
    assert (config.profile_steps, config.trace_steps) == ("1:6", Path("server_events.json"))
    config = moved.load(VLLM_PROFILE_STEPS="3, 3", VLLM_PROFILER_ENABLED="1", VLLM_PROFILE_FILE="t.json")
    assert (config.profile_steps, config.trace_steps) == ("4:1", Path("t.json"))
    assert not moved.warnings
    config = moved.load("--trace-steps", "ours.json", VLLM_PROFILE_STEPS="0,5")
    assert (config.profile_steps, config.trace_steps) == (None, Path("ours.json"))
    for bad in ("5", "5,4", "a,b", "1,2,3"):
        assert moved.refusal(VLLM_PROFILE_STEPS=bad) == f"VLLM_PROFILE_STEPS '{bad}': must be FIRST,LAST"


def test_own_options_win_wherever_they_stand(moved: Moved, tmp_path: Path) -> None:
    foreign = {"VLLM_GRAPH_RESERVED_MEM": "0.4"}
    file = tmp_path / "options.yaml"
    file.write_text("graph-reserved-mem: 0.3\n")
    assert moved.load("--config", str(file), **foreign).graph_reserved_mem == 0.3
    assert moved.load(CATENARY_ENGINE_GRAPH_RESERVED_MEM="0.2", **foreign).graph_reserved_mem == 0.2
    assert moved.load("--graph-reserved-mem", "0", **foreign).graph_reserved_mem == 0
    # An empty variable is one that was not set.
    assert moved.load(VLLM_GRAPH_RESERVED_MEM=" ").graph_reserved_mem == 0.1
