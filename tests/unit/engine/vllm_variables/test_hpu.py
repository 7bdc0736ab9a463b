"""Variables of the Gaudi device give the engine's options for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.device.hpu.fused import parse_switches
from services.engine.vllm_variables.hpu import recipe_cache
from tests.support.moved import Moved, moved

__all__ = ["moved"]

RECIPES = "PT_HPU_RECIPE_CACHE_CONFIG"


@pytest.mark.parametrize(
    ("variable", "text", "option", "value"),
    [
        ("VLLM_GC_THR_MULTIPLIER", "4", "gc_threshold_multiplier", 4),
        ("VLLM_CONFIG_HIDDEN_LAYERS", "8", "layers_per_graph", 8),
        ("VLLM_T_COMPILE_REGIONAL_COMPILATION", "false", "regional_compilation", False),
        ("VLLM_T_COMPILE_FULLGRAPH", "true", "compile_fullgraph", True),
    ],
)
def test_variable_sets_its_option(variable: str, text: str, option: str, value: object, moved: Moved) -> None:
    config = moved.load(**{variable: text})
    assert getattr(config, option) == value
    assert not moved.warnings
    assert config == moved.load().model_copy(update={option: value})
    assert moved.refusal(**{variable: "nonsense"}).startswith(f"{variable} 'nonsense': ")


def test_recipe_cache(moved: Moved) -> None:
    config = moved.load(**{RECIPES: "/cache,true,4096"})
    assert (config.recipe_cache, config.recipe_cache_clear, config.recipe_cache_mib) == (
        Path("/cache"),
        True,
        4096,
    )
    config = moved.load(**{RECIPES: "/cache"})
    assert (config.recipe_cache, config.recipe_cache_clear) == (Path("/cache"), False)
    assert config.recipe_cache_mib == moved.load().recipe_cache_mib
    assert moved.load(**{RECIPES: "/cache,False,1024,false"}).recipe_cache_mib == 1024
    # The bridge's own default.
    assert moved.load(**{RECIPES: ",false,1024,false"}).recipe_cache is None
    config = moved.load("--recipe-cache", "/ours", **{RECIPES: "/cache,true,4096"})
    assert (config.recipe_cache, config.recipe_cache_clear) == (Path("/ours"), False)
    for bad in ("/c,maybe,1", "/c,true,many", "/c,true,0", "/c,true,1,false,x", "/c,true,-4"):
        assert moved.refusal(**{RECIPES: bad}).startswith(f"{RECIPES} '{bad}': must be DIRECTORY,CLEAR,MIB")


@given(st.text(alphabet="/ac,true0159 -", max_size=24))
def test_any_text_is_a_recipe_cache_or_an_error(text: str) -> None:
    try:
        directory, _, mib = recipe_cache(text)
    except ValueError:
        return
    assert "," not in directory
    assert mib is None or mib >= 1


def test_logs_of_steps(moved: Moved) -> None:
    def logs(**environment: str) -> tuple[str, str]:
        config = moved.load(**environment)
        return config.log_step_compilations, config.log_step_fallbacks

    assert logs() == ("off", "off")
    assert logs(VLLM_HPU_LOG_STEP_GRAPH_COMPILATION="true") == ("new", "off")
    assert logs(VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL="1") == ("all", "off")
    assert logs(VLLM_HPU_LOG_STEP_CPU_FALLBACKS="1", VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL="1") == (
        "off",
        "all",
    )
    assert logs(VLLM_HPU_LOG_STEP_CPU_FALLBACKS="false") == ("off", "off")
    assert "must be true or false" in moved.refusal(VLLM_HPU_LOG_STEP_CPU_FALLBACKS="some")


def test_kernels_are_switched(moved: Moved) -> None:
    assert moved.load(VLLM_PROMPT_USE_FUSEDSDPA="false").kernels == "sdpa=off"
    # Insisting on it would keep a device without it from starting; vLLM's scripts always set it.
    assert moved.load(VLLM_PROMPT_USE_FUSEDSDPA="true").kernels == ""
    config = moved.load(VLLM_FUSED_BLOCK_SOFTMAX="0", VLLM_FUSED_BLOCK_SOFTMAX_ADJUSTMENT="1")
    assert config.kernels == "block_softmax=off,block_softmax_adjustment=on"
    assert parse_switches(config.kernels) == {"block_softmax": False, "block_softmax_adjustment": True}
    assert moved.load("--kernels", "rotary=off", VLLM_PROMPT_USE_FUSEDSDPA="0").kernels == "rotary=off"
    assert "must be true or false" in moved.refusal(VLLM_PROMPT_USE_FUSEDSDPA="maybe")


def test_softmax_of_fused_attention(moved: Moved) -> None:
    assert moved.load().attention_softmax == "auto"
    assert moved.load(VLLM_FP32_SOFTMAX="true").attention_softmax == "fp32"
    assert moved.load(VLLM_FP32_SOFTMAX="false").attention_softmax == "fast"


def test_long_prompts_are_attended_in_slices(moved: Moved) -> None:
    def slices(**environment: str) -> tuple[int, int]:
        config = moved.load(**{f"VLLM_HPU_FSDPA_SLICE_{name}": text for name, text in environment.items()})
        return config.attention_slice_from, config.attention_slice_chunk

    assert slices(SEQ_LEN_THLD="16384", CHUNK_SIZE="2048") == (16384, 2048)
    assert slices(SEQ_LEN_THLD="16384", ENABLED="false")[0] == 0
    assert slices(ENABLED="true") == slices()
    refusal = moved.refusal(VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE="100")
    assert refusal.startswith("VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE '100': ")


def test_compile_only_mode_is_refused(moved: Moved) -> None:
    assert moved.refusal(PT_COMPILE_ONLY_MODE="1").startswith("PT_COMPILE_ONLY_MODE: an engine would serve")
    moved.load(PT_COMPILE_ONLY_MODE="0")
    assert not moved.warnings
