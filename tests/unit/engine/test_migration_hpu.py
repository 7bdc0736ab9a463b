"""Variables of the Gaudi device give the engine's options for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary.migration.hpu import recipe_cache
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


def test_compile_only_mode_is_refused(moved: Moved) -> None:
    assert moved.refusal(PT_COMPILE_ONLY_MODE="1").startswith("PT_COMPILE_ONLY_MODE: an engine would serve")
    moved.load(PT_COMPILE_ONLY_MODE="0")
    assert not moved.warnings
