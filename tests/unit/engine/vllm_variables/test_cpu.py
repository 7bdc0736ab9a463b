"""vLLM's variables of a CPU give the engine's options."""

from __future__ import annotations

import pytest

from catenary_apps.up.config import UpConfig
from services.engine.vllm_variables import load_moved
from tests.support.moved import Moved, moved

__all__ = ["moved"]


def test_space_of_the_kv_cache(moved: Moved) -> None:
    assert moved.load(VLLM_CPU_KVCACHE_SPACE="3").kv_cache_gib == 3
    assert not moved.warnings
    assert moved.load(VLLM_CPU_KVCACHE_SPACE="0").kv_cache_gib is None
    assert moved.load("--kv-cache-gib", "1", VLLM_CPU_KVCACHE_SPACE="3").kv_cache_gib == 1
    assert moved.refusal(VLLM_CPU_KVCACHE_SPACE="4G") == "VLLM_CPU_KVCACHE_SPACE '4G': must be a whole number"


@pytest.mark.parametrize(
    ("text", "value"), [("auto", "auto"), ("nobind", "none"), ("0-3,8", "0-3,8"), ("0,1", "0,1")]
)
def test_binding_of_threads(text: str, value: str, moved: Moved) -> None:
    assert moved.load(VLLM_CPU_OMP_THREADS_BIND=text).cpu_bind == value
    assert not moved.warnings
    assert moved.load("--cpu-bind", "5", VLLM_CPU_OMP_THREADS_BIND=text).cpu_bind == "5"


def test_binding_that_cannot_be_read(moved: Moved) -> None:
    refusal = moved.refusal(VLLM_CPU_OMP_THREADS_BIND="all")
    assert refusal == "VLLM_CPU_OMP_THREADS_BIND 'all' is no set of CPUs such as 0-3,8"
    # An engine that was started by itself is one.
    assert "an engine has one list of CPUs" in moved.refusal(VLLM_CPU_OMP_THREADS_BIND="0-1|2-3")


def test_lists_of_several_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1|2-3")
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")
    config, warnings = load_moved(UpConfig, (), prog="catenary up", beside="CATENARY_ENGINE_")
    assert (config.cpu_bind, config.cpu_reserve, warnings) == ("0-1|2-3", 1, ())


def test_reserved_cores(moved: Moved) -> None:
    assert moved.load(VLLM_CPU_NUM_OF_RESERVED_CPU="2").cpu_reserve == 2
    assert not moved.warnings
    assert (
        moved.refusal(VLLM_CPU_NUM_OF_RESERVED_CPU="-1")
        == "VLLM_CPU_NUM_OF_RESERVED_CPU -1: must be 0 to 1024"
    )


def test_another_device_takes_none_of_them(moved: Moved) -> None:
    given = {
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    }
    config = moved.load("--device", "cuda", **given)
    assert (config.kv_cache_gib, config.cpu_bind, config.cpu_reserve) == (None, "auto", None)
    assert moved.warnings == tuple(
        f"{name} has no effect on a device that is no CPU (cuda)" for name in given
    )


def test_what_there_is_no_use_for(moved: Moved) -> None:
    moved.load(VLLM_CPU_MOE_PREPACK="1")
    assert moved.warnings == (
        "VLLM_CPU_MOE_PREPACK has no effect: experts are always packed when they are loaded",
    )
