"""Options that concern CPUs alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import BaseModel, Field, field_validator

from catenary.cpus import parse_binding


class CpuOptions(BaseModel):
    """A part of the engine's options."""

    headings: ClassVar[Mapping[str, str]] = {
        "device_threads": "CPU",
    }

    device_threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="CPU, simulated HPU: threads of the core's forwards. 0: one for each core that it may "
        "use.",
    )
    cpu_bind: str = Field(
        "auto",
        max_length=4096,
        description="CPU: CPUs that the core's threads keep to, such as 0-7,16, one thread for each. none: "
        "wherever there is room. auto: what catenary up gives each of its engines; an engine that was "
        "started by itself is not bound.",
    )
    cpu_reserve: int | None = Field(
        None,
        ge=0,
        le=1024,
        description="CPU: cores that the threads of the core leave free, unless cpu_bind or device_threads "
        "say what they take. Absent: none.",
    )
    cpu_slice_us: int = Field(
        100,
        ge=0,
        le=100_000,
        description="CPU: microseconds that the threads of a generating model's forwards ask the system's "
        "scheduler to run at a time (Linux 6.12; its least are 100), so that one that wakes up takes its "
        "core back from other services at once, and not after theirs. No share of the cores changes by it. "
        "0: what the system gives everybody.",
    )
    malloc: Literal["auto", "system", "tcmalloc", "jemalloc"] = Field(
        "auto",
        description="CPU: allocator that the core is started with. auto: tcmalloc or jemalloc where one is "
        "installed and LD_PRELOAD is not set.",
    )
    cpu_kernels: Literal["auto", "native", "torch"] = Field(
        "auto",
        description="CPU: what computes the decoder. native: our own kernels in C++, which the first start "
        "builds, or no start. torch: torch's operations. auto: native where there is a C++ compiler and the "
        "model is known to them (in float32 or bfloat16), and without compile. Of encoders native computes "
        "the linear layers, and auto is torch unless there is a quantization.",
    )
    cpu_kernels_compile_timeout_s: float = Field(
        180.0,
        gt=0,
        le=3600,
        description="CPU: seconds that the C++ compiler may take for one of twenty files of the kernels; "
        "then it is ended, and torch computes.",
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none",
        description="CPU: what weights are packed as when they are loaded, for less memory and more speed. "
        "int8: eight bits, a scale for each output; the inputs of a product too, a scale for each token. "
        "int4: four bits, a scale and an offset for 32 inputs of each output; the head has eight. int8 is "
        "faster but for one stream at a time on AVX-512. Of encoders the linear layers are packed.",
    )

    @field_validator("cpu_bind")
    @classmethod
    def _known_binding(cls, text: str) -> str:
        if len(parse_binding(text).lists) > 1:
            raise ValueError("an engine has one list of CPUs; catenary up takes one for each of its engines")
        return text
