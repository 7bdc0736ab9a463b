"""Variables of vLLM's CPU backend."""

from __future__ import annotations

from catenary.config import ConfigError
from catenary.cpus import parse_binding
from services.engine.vllm_variables.rows import Row, Status, Variables, unneeded

_TEST = "tests/unit/engine/vllm_variables/test_cpu.py::"
SPACE, BIND, RESERVED = "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU"


def _translate(variables: Variables) -> None:
    """Translate the CPU backend's variables; for other devices, where a machine's profile may set them, do
    nothing."""
    space = variables.integer(SPACE, most=1_048_576)
    bind = _binding(variables)
    reserved = variables.integer(RESERVED, most=1024)
    given = {
        "kv_cache_gib": (space or None, SPACE),
        "cpu_bind": (bind, BIND),
        "cpu_reserve": (reserved, RESERVED),
    }
    device = str(variables.own.get("device", "cpu"))
    for option, (value, name) in given.items():
        if value is None:
            continue
        if device == "cpu":
            variables.give(option, value, name)
        else:
            variables.warn(f"{name} has no effect on a device that is no CPU ({device[:20]})")


def _binding(variables: Variables) -> str | None:
    text = variables.text(BIND)
    if text is None:
        return None
    word = "none" if text.lower() == "nobind" else text
    try:
        parse_binding(word)
    except ValueError as error:
        raise ConfigError(f"{BIND} {error}") from None
    return word


ROWS = (
    Row(
        (SPACE,),
        Status.SUPPORTED,
        "`--kv-cache-gib` of an engine on a CPU; 0 leaves it to the engine",
        _translate,
        f"{_TEST}test_space_of_the_kv_cache",
    ),
    Row(
        (BIND,),
        Status.SUPPORTED,
        "`--cpu-bind`: `auto`, `nobind`, or lists such as `0-7|8-15`, one for each engine where vLLM has one "
        "for each rank",
        _translate,
        f"{_TEST}test_binding_of_threads",
    ),
    Row(
        (RESERVED,),
        Status.SUPPORTED,
        "`--cpu-reserve`: cores for each engine that its threads leave to the services",
        _translate,
        f"{_TEST}test_reserved_cores",
    ),
    unneeded("experts are always packed when they are loaded", "VLLM_CPU_MOE_PREPACK"),
    unneeded(
        "kernels are those of the processor at hand",
        "VLLM_CPU_SGL_KERNEL",
        "VLLM_CPU_ATTN_SPLIT_KV",
        "VLLM_CPU_INT4_W4A8",
        "VLLM_ZENTORCH_WEIGHT_PREPACK",
    ),
    unneeded("it concerns vLLM's own tests", "VLLM_CPU_CI_ENV"),
)
