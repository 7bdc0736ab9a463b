"""Tiny random models, and an engine core driven in this process, for tests that import torch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from services.engine.config import EngineConfig
from services.engine.core.generation import GeneratingEngine
from services.engine.core.loop import CoreLoop
from services.engine.core.process import start_engine
from services.engine.device import Device
from services.engine.domain import SamplingOptions
from services.engine.link import (
    AbortSequences,
    CoreStep,
    EndRow,
    KvChanges,
    KvContents,
    PromptColumns,
    SubmitSequence,
)
from services.engine.options import EngineOptions

VOCAB = 128

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# Architecture: class, and what differs from the small default.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 11}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {"head_dim": 16, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "granite": ("GraniteForCausalLM", {"logits_scaling": 3.0, "attention_multiplier": 0.3}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}


def save_tiny_model(kind: str, directory: Path, **overrides: Any) -> Path:
    """Writes a random model whose next-token scores are far apart, so that greedy decoding has no ties."""
    name, changes = KINDS[kind]
    model_class: Any = getattr(transformers, name)
    torch.manual_seed(7)
    config = model_class.config_class(**{**_SMALL, **changes, **overrides})
    model = model_class(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 1.0))
    model.save_pretrained(directory)
    return directory


def core_options(**overrides: Any) -> EngineOptions:
    """The engine's defaults, as its core gets them, with changes."""
    options = EngineOptions.decode(EngineConfig(device="cpu").model_dump_json().encode())
    return EngineOptions(**(options.model_dump() | overrides))


def tiny_options(directory: Path, **overrides: Any) -> EngineOptions:
    """Options of a small float32 core."""
    values: dict[str, Any] = {
        "model": str(directory),
        "dtype": "float32",
        "block_size": 8,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 24,
        "kv_cache_gib": 0.01,
        "device_threads": 1,
    }
    values |= overrides
    # Chunks are as long as a test says, whoever computes them.
    values.setdefault("max_idle_batched_tokens", values["max_num_batched_tokens"])
    values.setdefault("max_prefill_batch", 4)
    return core_options(**values)


class MemoryLink:
    """Stands in for the socket: keeps what the core sends."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.inbox: deque[Any] = deque()

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def wake(self) -> None:
        """Its poll never waits."""

    def poll(self, timeout: float | None = 0.0) -> list[Any]:
        messages = list(self.inbox)
        self.inbox.clear()
        return messages


@dataclass
class Output:
    """What one sequence got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)
    prompt: list[tuple[float, dict[int, float]]] = field(default_factory=list)
    end: EndRow | None = None


class LocalCore:
    """A core's loop in this process."""

    def __init__(self, options: EngineOptions, device: Device | None = None) -> None:
        engine = start_engine(options, lambda activity, fraction: None, device)
        if not isinstance(engine, GeneratingEngine):
            raise AssertionError("the model does not generate")
        self.engine: GeneratingEngine = engine
        self.link = MemoryLink()
        link: Any = self.link
        self.loop = CoreLoop(link, engine)
        self.work: Any = self.loop.work
        self.outputs: dict[int, Output] = {}
        self.kv_event_delta: list[KvContents | KvChanges] = []
        self._keys = 0

    def submit(self, token_ids: list[int], **options: Any) -> int:
        """Hands a sequence to the loop; greedy with 16 tokens unless told otherwise. Returns its key."""
        self._keys += 1
        values: dict[str, Any] = {
            "prompt_len": len(token_ids),
            "max_tokens": 16,
            "min_tokens": 0,
            "stop_token_ids": [],
            "ignore_eos": True,
        }
        sampling: dict[str, Any] = {"temperature": 0.0, "seed": 1}
        for name, value in options.items():
            (sampling if name in SamplingOptions.__struct_fields__ else values)[name] = value
        self.outputs[self._keys] = Output()
        self.loop.handle(
            SubmitSequence(self._keys, token_ids, sampling=SamplingOptions(**sampling), **values)
        )
        return self._keys

    def abort(self, key: int) -> None:
        """Ends a sequence."""
        self.loop.handle(AbortSequences([key]))

    def step(self) -> CoreStep | None:
        """Turns of the loop until it reports something, or has nothing to do."""
        report = self.turn()
        while report is None and self.loop.work.busy:
            report = self.turn()
        return report

    def turn(self) -> CoreStep | None:
        """One turn of the loop; returns what it reported."""
        before = len(self.link.sent)
        self.loop.advance()
        new: list[Any] = []
        for message in self.link.sent[before:]:
            kept = self.kv_event_delta if isinstance(message, KvContents | KvChanges) else new
            kept.append(message)
        if len(new) > 1:
            raise AssertionError(f"{len(new)} messages in one turn")
        for message in new:
            self._read(message)
        return new[0] if new else None

    def run(self, limit: int = 2000) -> None:
        """Steps until no sequence lives."""
        for _ in range(limit):
            if self.step() is None:
                return
        raise AssertionError("the sequences do not end")

    def _read(self, message: CoreStep) -> None:
        columns = message.columns
        tokens, sampled = iter(columns.token_ids), iter(columns.sampled)
        counts = iter(columns.top_counts)
        tops = iter(zip(columns.top_ids, columns.top_logprobs, strict=True))
        with_logprobs = set(columns.logprob_rows)
        for row, (key, count) in enumerate(zip(columns.keys, columns.token_counts, strict=True)):
            output = self.outputs[key]
            for _ in range(count):
                output.token_ids.append(next(tokens))
                if row in with_logprobs:
                    output.logprobs.append(next(sampled))
                    output.tops.append(dict(next(tops) for _ in range(next(counts))))
        if columns.prompts is not None:
            self._read_prompts(columns.keys, columns.prompts)
        for end in columns.ends:
            self.outputs[columns.keys[end.row]].end = end

    def _read_prompts(self, keys: list[int], prompts: PromptColumns) -> None:
        values = iter(zip(prompts.logprobs, prompts.top_counts, strict=True))
        tops = iter(zip(prompts.top_ids, prompts.top_logprobs, strict=True))
        for row, count in zip(prompts.rows, prompts.counts, strict=True):
            for _ in range(count):
                logprob, best = next(values)
                self.outputs[keys[row]].prompt.append((logprob, dict(next(tops) for _ in range(best))))
