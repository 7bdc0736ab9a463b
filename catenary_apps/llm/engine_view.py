"""Attributes of an LLM's engine by vLLM's names: `llm.llm_engine.model_config.max_model_len`.

What is not there is an AttributeError that says what to use.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from catenary.nearest import near
from services.engine.link import CapacityFacts, ModelFacts


class Lacking:
    """An object that says of an attribute of vLLM's that it does not have what is there in its place."""

    _LACKS: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            if name in self._LACKS:
                raise AttributeError(f"{kind} has no {name}: {self._LACKS[name]}")
            known = [known for known in dir(type(self)) if not known.startswith("_")]
            raise AttributeError(f"{kind} has no {name!r}{near(name, known)}")


@dataclass(frozen=True)
class ModelConfig(Lacking):
    """The model as it is loaded.

    Args:
        model: as the LLM was given it; `tokenizer` is the same.
        served_model_name: what answers and logs call it.
        directory: where its files are.
        facts: what the engine says of it.
    """

    model: str
    served_model_name: str
    directory: Path
    facts: ModelFacts

    _LACKS = {
        "quantization": "catenary plan MODEL says how a checkpoint is packed",
        "seed": "LLM(seed=...) draws seeds, SamplingParams(seed=...) is one",
        "is_multimodal_model": "models take text alone so far",
        "multimodal_config": "models take text alone so far",
    }

    @property
    def tokenizer(self) -> str:
        """The tokenizer is that of the model's directory."""
        return self.model

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence, prompt and answer together."""
        return self.facts.max_model_len

    @property
    def dtype(self) -> Any:
        """The torch.dtype of the computation."""
        return getattr(importlib.import_module("torch"), self.facts.dtype)

    @property
    def hf_config(self) -> Any:
        """The configuration as transformers has it."""
        transformers: Any = importlib.import_module("transformers")
        return transformers.AutoConfig.from_pretrained(self.directory, local_files_only=True)

    @property
    def hf_text_config(self) -> Any:
        """The part of the configuration that is about text, which may be all of it."""
        return self.hf_config.get_text_config()

    def get_vocab_size(self) -> int:
        """Return the width of the logits."""
        return self.facts.vocab_size

    def get_hidden_size(self) -> int:
        """Return the width of the hidden states."""
        return int(self.hf_text_config.hidden_size)

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Return the sampling defaults of generation_config.json, by the names of SamplingParams."""
        most = _max_new_tokens(self.directory / "generation_config.json")
        return {**self.facts.sampling_defaults, **({} if most is None else {"max_tokens": most})}


@dataclass(frozen=True)
class CacheConfig(Lacking):
    """The KV cache: tokens of a block, and how many blocks there are."""

    block_size: int
    num_gpu_blocks: int


@dataclass(frozen=True)
class SchedulerConfig(Lacking):
    """Sequences that run at once, and tokens of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True)
class EngineConfigs(Lacking):
    """The engine's settings, in vLLM's parts."""

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig

    _LACKS = {
        "parallel_config": "an engine has one card",
        "lora_config": "LoRA adapters are not done yet",
        "speculative_config": "speculative decoding is not done yet",
    }


@dataclass(frozen=True)
class EngineView(Lacking):
    """The readable state of an engine."""

    vllm_config: EngineConfigs
    get_tokenizer: Callable[[], Any]

    _LACKS = {
        "engine_core": "LLM.close() ends the engine",
        "model_executor": "the model's modules are the engine's own; transformers can load them too",
        "collective_rpc": "no code of a program's runs in the engine",
        "apply_model": "no code of a program's runs in the engine",
        "add_request": "LLM.generate takes a batch, and its on_output tells each output as it ends",
        "step": "LLM.generate takes a batch, and its on_output tells each output as it ends",
        "has_unfinished_requests": "LLM.generate comes back when all have ended",
        "abort_request": "Ctrl-C ends what a call has begun",
        "get_tokenizer_group": "use get_tokenizer()",
        "parallel_config": "an engine has one card",
        "add_lora": "LoRA adapters are not done yet",
        "do_log_stats": "an LLM keeps no statistics; catenary bench throughput measures",
        "get_metrics": "an LLM keeps no statistics; catenary bench throughput measures",
    }

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    @property
    def cache_config(self) -> CacheConfig:
        return self.vllm_config.cache_config

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return self.vllm_config.scheduler_config

    @property
    def tokenizer(self) -> Any:
        """The tokenizer as transformers has it."""
        return self.get_tokenizer()


def view_of(model: ModelConfig, capacity: CapacityFacts, get_tokenizer: Callable[[], Any]) -> EngineView:
    """Return an engine of a loaded model."""
    cache = CacheConfig(capacity.block_size, capacity.total_blocks)
    scheduler = SchedulerConfig(capacity.max_running, capacity.max_batched_tokens, model.max_model_len)
    return EngineView(EngineConfigs(model, cache, scheduler), get_tokenizer)


def _max_new_tokens(path: Path) -> int | None:
    """Return the length of answers that a generation_config.json asks for.

    It has been read by the engine before.
    """
    if not path.is_file():
        return None
    length = json.loads(path.read_text(encoding="utf-8")).get("max_new_tokens")
    return length if isinstance(length, int) and length > 0 else None
