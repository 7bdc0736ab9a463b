"""Options that concern HPUs alone, real or simulated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, Field, model_validator


class HpuOptions(BaseModel):
    """A part of the engine's options."""

    headings: ClassVar[Mapping[str, str]] = {
        "layers_per_graph": "Gaudi",
    }

    layers_per_graph: int = Field(
        1,
        ge=0,
        le=4096,
        description="HPU, lazy: decoder layers between two flushes to the graph compiler. 0: no flush.",
    )
    regional_compilation: bool = Field(
        True,
        description="HPU, compiled: each layer, norm and the head apart, so that layers share code. Off: a "
        "forward as a whole.",
    )
    compile_fullgraph: bool = Field(
        False, description="HPU, compiled: fail where the compiler would cut a region in two."
    )
    compile_only_warmup: bool = Field(
        True, description="HPU, compiled: a full warm-up compiles without running, which takes less time."
    )
    weights_load_device: Literal["device", "cpu"] = Field(
        "device", description="HPU: cpu loads all weights to host memory first and moves them then."
    )
    recipe_cache: Path | None = Field(
        None,
        description="HPU: directory for compiled recipes, kept for the next start, one part for each release "
        "of Habana's software and rank. A local disk is best.",
    )
    recipe_cache_mib: int = Field(
        10_240, ge=1, le=16_777_216, description="HPU: size of the recipe cache in MiB."
    )
    recipe_cache_clear: bool = Field(False, description="HPU: empty the recipe cache at start.")
    gc_threshold_multiplier: int = Field(
        16, ge=1, le=10_000, description="HPU: factor of Python's garbage collection thresholds in the core."
    )
    numa_binding: bool = Field(
        True, description="HPU: keep the core on the CPUs of its card's NUMA node, where that is known."
    )
    kernels: str = Field(
        "",
        description="HPU: fused kernels to switch, such as sdpa=off,block_softmax=on. Names: sdpa, "
        "sdpa_sinks, sliced_sdpa, rms_norm, rotary, experts, block_softmax, block_softmax_adjustment, "
        "index_reduce. What is off runs in torch's own operations.",
    )
    attention_softmax: Literal["auto", "fast", "fp32"] = Field(
        "auto",
        description="HPU: attention's scores and their softmax in bfloat16 (fast), or in float32 and slower "
        "(fp32). auto: float32 for the families that need it (qwen2), else bfloat16.",
    )
    attention_slice_from: int = Field(
        8192,
        ge=0,
        le=16_777_216,
        description="HPU: keys from which on a prompt with cached context is attended in slices, which takes "
        "less memory. 0: never.",
    )
    attention_slice_chunk: int = Field(
        4096, ge=1024, le=16_777_216, description="HPU: queries and keys of such a slice, at most."
    )
    log_step_compilations: Literal["off", "new", "all"] = Field(
        "off", description="HPU: log graph compilations of steps: of those that have any, or of all."
    )
    log_step_fallbacks: Literal["off", "new", "all"] = Field(
        "off", description="HPU: log operations that ran on the CPU: of steps that have any, or of all."
    )

    @model_validator(mode="after")
    def _recipes_have_a_directory(self) -> Self:
        for name in ("recipe_cache_mib", "recipe_cache_clear"):
            if self.recipe_cache is None and getattr(self, name) != HpuOptions.model_fields[name].default:
                raise ValueError(f"{name} needs recipe_cache, the directory that recipes are kept in")
        return self
