"""Options that concern CPUs alone."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class CpuOptions(BaseModel):
    """A part of the engine's options."""

    cpu_kernels: Literal["auto", "native", "torch"] = Field(
        "auto",
        description="CPU: what computes the decoder. native: our own kernels in C++, which the first start "
        "builds, or no start. torch: torch's operations. auto: native where there is a C++ compiler and the "
        "model is known to them (no mixture of experts, float32 or bfloat16), and without compile.",
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none",
        description="CPU: what weights are packed as when they are loaded, for less memory and more speed. "
        "int8: eight bits, a scale for each output; the inputs of a product too, a scale for each token. "
        "int4: four bits, a scale for 32 inputs of each output; the head has eight.",
    )
