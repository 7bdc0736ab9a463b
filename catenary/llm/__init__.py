"""Offline batches: a model in this process, without servers, with vLLM's call shapes.

Needs the extras of the engine, the tokenizer, the gateway and the command line.
"""

from __future__ import annotations

from catenary.llm.llm import LLM
from catenary.llm.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
)
from catenary.llm.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
]
