"""What programs read of an LLM's engine by vLLM's names, and what they are told of the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from catenary_apps.llm import LLM
from catenary_apps.llm.engine_view import EngineView, ModelConfig, view_of
from services.engine.link import CapacityFacts, ModelFacts

CAPACITY = CapacityFacts(
    block_size=32, total_blocks=100, max_running=8, max_waiting=64, max_batched_tokens=512
)


def view(directory: Path, **defaults: float) -> EngineView:
    facts = ModelFacts(
        max_model_len=512,
        vocab_size=300,
        eos_token_ids=[2],
        dtype="bfloat16",
        tokenizer_sha256="",
        sampling_defaults=defaults,
    )
    return view_of(ModelConfig("alias", "served", directory, facts), CAPACITY, lambda: "tokenizer")


def test_what_is_there(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = view(tmp_path)
    model = engine.model_config
    assert model is engine.vllm_config.model_config
    assert (model.model, model.tokenizer, model.served_model_name) == ("alias", "alias", "served")
    assert (model.max_model_len, model.dtype) == (512, torch.bfloat16)
    assert (model.get_vocab_size(), model.get_hidden_size()) == (300, 48)
    assert model.hf_config.model_type == "llama"
    assert engine.cache_config.block_size == engine.vllm_config.cache_config.block_size == 32
    assert engine.cache_config.num_gpu_blocks == 100
    assert (engine.scheduler_config.max_num_seqs, engine.scheduler_config.max_num_batched_tokens) == (8, 512)
    assert engine.tokenizer == engine.get_tokenizer() == "tokenizer"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("engine_core", r"EngineView has no engine_core: LLM\.close\(\) ends the engine"),
        ("add_request", r"EngineView has no add_request: LLM\.generate takes a batch"),
        ("get_tokenizer_group", r"use get_tokenizer\(\)"),
        ("model_confg", r"EngineView has no 'model_confg' .did you mean 'model_config'"),
        ("model_config.max_model_length", "ModelConfig has no .* .did you mean 'max_model_len'"),
        ("model_config.quantization", "ModelConfig has no quantization: catenary plan"),
        ("vllm_config.parallel_config", "EngineConfigs has no parallel_config: an engine has one card"),
        ("cache_config.zzz", "CacheConfig has no 'zzz'$"),
    ],
)
def test_what_is_not_there_names_what_is(path: str, text: str, tmp_path: Path) -> None:
    *parents, name = path.split(".")
    found: object = view(tmp_path)
    for parent in parents:
        found = getattr(found, parent)
    assert not hasattr(found, name)
    with pytest.raises(AttributeError, match=text):
        getattr(found, name)


@pytest.mark.parametrize(
    ("generation", "defaults", "expected"),
    [
        (None, {}, {}),
        ({"temperature": 0.5}, {"temperature": 0.5}, {"temperature": 0.5}),
        ({"max_new_tokens": 99}, {"top_p": 0.9}, {"top_p": 0.9, "max_tokens": 99}),
        ({"max_new_tokens": None}, {"top_k": 20, "min_p": 0.1}, {"top_k": 20, "min_p": 0.1}),
    ],
)
def test_defaults_of_sampling(
    generation: dict[str, float] | None,
    defaults: dict[str, float],
    expected: dict[str, float],
    tmp_path: Path,
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert view(tmp_path, **defaults).model_config.get_diff_sampling_param() == expected


def test_an_llm_names_what_is_there_for_what_it_lacks() -> None:
    llm = LLM.__new__(LLM)
    for name, text in (
        ("sleep", r"LLM has no sleep: close\(\) gives the memory back"),
        ("generat", "LLM has no 'generat' .did you mean 'generate'"),
        ("_lifetime", "LLM has no '_lifetime'"),
    ):
        with pytest.raises(AttributeError, match=text):
            getattr(llm, name)
