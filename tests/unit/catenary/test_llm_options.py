"""What `LLM(...)` and its parameters refuse when they are given, and what is done with vLLM's names."""

from __future__ import annotations

from typing import Any

import pytest

from catenary import BeamSearchParams, PoolingParams, SamplingParams
from catenary.llm.options import make_config, read_options

CHOSEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_num_seqs": 8, "dtype": "float32"}, {"max_num_seqs": 8, "dtype": "float32"}),
    ({"dtype": "half"}, {"dtype": "float16"}),
    ({"task": "embedding"}, {"task": "embed"}),
    ({"task": "classify"}, {"task": "classify"}),
    ({"runner": "pooling", "convert": "embed"}, {"task": "embed"}),
    ({"max_model_len": "2k"}, {"max_model_len": 2000}),
    ({"max_model_len": -1}, {}),
    ({"kv_cache_memory_bytes": 1 << 30}, {"kv_cache_gib": 1.0}),
    ({"enforce_eager": True, "quantization": "int8"}, {"enforce_eager": True, "quantization": "int8"}),
    ({"model_impl": "transformers"}, {"model_backend": "transformers"}),
    ({"tensor_parallel_size": 1, "enable_lora": False, "load_format": "auto"}, {}),
    ({"disable_log_stats": True, "disable_custom_all_reduce": True}, {}),
    ({"quantization": None, "speculative_config": None, "tokenizer": "m"}, {}),
    ({"served_model_name": "named"}, {"served_model_name": "named"}),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tensor_parallel_size": 4}, "tensor_parallel_size 4: an engine on several cards is not done yet"),
    ({"pipeline_parallel_size": 2}, "several cards is not done yet"),
    ({"data_parallel_size": 2}, "an LLM has one engine"),
    ({"quantization": "fp8"}, r"quantization='fp8': .*'int4'; quantized models are not done yet, FP8"),
    ({"enable_lora": True}, "enable_lora: LoRA adapters are not done yet"),
    (
        {"speculative_config": {"method": "ngram"}},
        "speculative_config .*: speculative decoding is not done yet",
    ),
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8: the KV cache has the type of the computation"),
    ({"hf_overrides": {"a": 1}}, "hf_overrides .*: edit config.json"),
    ({"tokenizer": "other"}, "tokenizer other: the tokenizer is that of the model's directory"),
    ({"task": "reward"}, "task='reward': input should be"),
    ({"dtype": "float7"}, "dtype='float7': input should be"),
    ({"max_num_seqs": 0}, "max_num_seqs=0: input should be greater than or equal to 1"),
    ({"gpu_memory_utilization": 2}, "gpu_memory_utilization=2: "),
    ({"port": 8000}, "port: an LLM has no server"),
]
UNKNOWN = [
    ("max_num_sequences", " .did you mean 'max_num_seqs'"),
    ("tensor_paralel_size", " .did you mean 'tensor_parallel_size'"),
    ("zzz", "$"),
    ("router", ": there is no network in it"),
]


@pytest.mark.parametrize(("given", "expected"), CHOSEN, ids=str)
def test_options(given: dict[str, Any], expected: dict[str, Any]) -> None:
    config = make_config(read_options("m", given).engine)
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.model_fields_set == expected.keys()


@pytest.mark.parametrize(("given", "text"), REFUSED, ids=str)
def test_what_cannot_be_done_is_one_line(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text) as refused:
        make_config(read_options("m", given).engine)
    assert "\n" not in str(refused.value)
    assert "http" not in str(refused.value)


@pytest.mark.parametrize(("name", "text"), UNKNOWN)
def test_an_unknown_option_names_one_that_is_near(name: str, text: str) -> None:
    with pytest.raises(TypeError, match=f"LLM has no option '{name}'{text}"):
        read_options("m", {name: 1})


def test_what_changes_nothing_is_said() -> None:
    with pytest.warns(UserWarning, match="swap_space has no effect: a sequence that loses its blocks"):
        read_options("m", {"swap_space": 4})


PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "'n'.*at least 1"),
    ({"n": 129}, "'n'.*at most 128"),
    ({"temperature": -1}, "'temperature'.*at least 0"),
    ({"temperature": float("nan")}, "'temperature'"),
    ({"temperature": "hot"}, "'temperature'"),
    ({"top_p": -0.1}, "'top_p'.*at least 0"),
    ({"top_p": 1.1}, "'top_p'.*at most 1"),
    ({"top_k": -2}, "'top_k'.*at least -1"),
    ({"min_p": 2}, "'min_p'.*at most 1"),
    ({"seed": 1 << 63}, "'seed'"),
    ({"presence_penalty": 2.5}, "'presence_penalty'.*at most 2"),
    ({"frequency_penalty": -2.5}, "'frequency_penalty'.*at least -2"),
    ({"repetition_penalty": 0}, r"'repetition_penalty'.*at least 0\.01"),
    ({"logit_bias": {5: 200}}, "'logit_bias'.*-100 and 100"),
    ({"logit_bias": {"a": 1}}, "'logit_bias'"),
    ({"logit_bias": [1]}, "'logit_bias'"),
    ({"allowed_token_ids": []}, "'allowed_token_ids'"),
    ({"allowed_token_ids": [-1]}, "'allowed_token_ids'"),
    ({"bad_words": [""]}, "'bad_words'"),
    ({"stop": 5}, "'stop'"),
    ({"stop_token_ids": ["a"]}, "'stop_token_ids"),
    ({"include_stop_str_in_output": "yes"}, "'include_stop_str_in_output'"),
    ({"ignore_eos": 1}, "'ignore_eos'"),
    ({"max_tokens": 0}, "'max_tokens'"),
    ({"max_tokens": 4, "min_tokens": 5}, "'min_tokens'.*at most 'max_tokens'"),
    ({"logprobs": 21}, "'logprobs'.*at most 20"),
    ({"prompt_logprobs": -1}, "'prompt_logprobs'"),
    ({"skip_special_tokens": 0}, "'skip_special_tokens'"),
    ({"spaces_between_special_tokens": "no"}, "'spaces_between_special_tokens'"),
    ({"truncate_prompt_tokens": 0}, "'truncate_prompt_tokens'"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
]


@pytest.mark.parametrize(("given", "text"), PARAMETERS, ids=str)
def test_a_sampling_parameter_is_checked_when_it_is_given(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SamplingParams(**given)


def test_every_sampling_parameter_is_checked() -> None:
    assert {name for given, _ in PARAMETERS for name in given} == set(SamplingParams.__dataclass_fields__)
    params = SamplingParams(temperature=2.5, top_k=-1, stop=("a", "b"), logit_bias={5: -100}, max_tokens=None)
    assert params.body()["stop"] == ["a", "b"]
    assert params.body()["logit_bias"] == {"5": -100}
    assert "max_tokens" not in params.body()


@pytest.mark.parametrize("kind", [SamplingParams, BeamSearchParams, PoolingParams])
def test_an_unknown_parameter_names_one_that_is_near(kind: Any) -> None:
    near = {SamplingParams: "temperature", BeamSearchParams: "temperature", PoolingParams: "dimensions"}[kind]
    with pytest.raises(TypeError, match=f"{kind.__name__} has no parameter .*did you mean '{near}'"):
        kind(**{near[:-2] + near[-1]: 1})


@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        (BeamSearchParams, {"beam_width": 0, "max_tokens": 1}, "beam_width must be an integer at least 1"),
        (BeamSearchParams, {"beam_width": 11, "max_tokens": 1}, "beam_width must be .* at most 10"),
        (BeamSearchParams, {"beam_width": 2, "max_tokens": 0}, "max_tokens must be"),
        (
            BeamSearchParams,
            {"beam_width": 2, "max_tokens": 1, "temperature": 0.5},
            "temperature must be 0 or 1",
        ),
        (
            BeamSearchParams,
            {"beam_width": 2, "max_tokens": 1, "length_penalty": 11},
            "length_penalty must be",
        ),
        (PoolingParams, {"dimensions": 0}, "dimensions must be"),
        (PoolingParams, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be"),
        (PoolingParams, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be"),
        (PoolingParams, {"use_activation": "no"}, "use_activation must be"),
    ],
)
def test_other_parameters(kind: Any, given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        kind(**given)
