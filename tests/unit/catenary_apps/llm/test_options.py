"""What `LLM(...)` and its parameters refuse when they are given, and what is done with vLLM's names."""

from __future__ import annotations

from typing import Any

import pytest

from catenary import (
    BeamSearchParams,
    GuidedDecodingParams,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)
from catenary_apps.llm.stack import make_config, read_options

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
    ({"quantization": "fp8"}, r"quantization='fp8': .*int8 or int4; quantized models are not done yet, FP8"),
    ({"enable_lora": True}, "enable_lora: LoRA adapters are not done yet"),
    (
        {"speculative_config": {"method": "ngram"}},
        "speculative_config .*: speculative decoding is not done yet",
    ),
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8: the KV cache has the type of the computation"),
    ({"hf_overrides": {"a": 1}}, "hf_overrides .*: edit config.json"),
    ({"tokenizer": "other"}, "tokenizer other: the tokenizer is that of the model's directory"),
    ({"task": "reward"}, "task='reward': expected auto, generate"),
    ({"dtype": "float7"}, "dtype='float7': expected auto, float32"),
    ({"max_num_seqs": 0}, "max_num_seqs=0: expected a whole number from 1 to 4096"),
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
        read_options("m", {"swap_space": 8})
    with pytest.warns(UserWarning, match="trust_remote_code has no effect: code from a model's"):
        read_options("m", {"trust_remote_code": True})


# vLLM's defaults, those of several of its releases.
DEFAULTS: dict[str, tuple[Any, ...]] = {
    "additional_config": ({}, None),
    "allowed_local_media_path": ("",),
    "block_size": (None,),
    "calculate_kv_scales": (False,),
    "compilation_config": (None, {}),
    "config_format": ("auto",),
    "convert": ("auto",),
    "cpu_offload_gb": (0, 0.0),
    "cuda_graph_sizes": ([],),
    "data_parallel_backend": ("mp",),
    "data_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "disable_async_output_proc": (False,),
    "disable_cascade_attn": (False,),
    "disable_chunked_mm_input": (False,),
    "disable_custom_all_reduce": (False,),
    "disable_log_stats": (False, True),
    "disable_mm_preprocessor_cache": (False,),
    "disable_sliding_window": (False,),
    "distributed_executor_backend": (None,),
    "download_dir": (None,),
    "dtype": ("auto",),
    "enable_chunked_prefill": (None, True),
    "enable_eplb": (False,),
    "enable_expert_parallel": (False,),
    "enable_lora": (False,),
    "enable_lora_bias": (False,),
    "enable_prefix_caching": (None,),
    "enable_prompt_adapter": (False,),
    "enable_prompt_embeds": (False,),
    "enable_sleep_mode": (False,),
    "fully_sharded_loras": (False,),
    "generation_config": ("auto",),
    "guided_decoding_backend": ("auto",),
    "guided_decoding_disable_any_whitespace": (False,),
    "guided_decoding_disable_additional_properties": (False,),
    "guided_decoding_disable_fallback": (False,),
    "hf_config_path": (None,),
    "hf_overrides": ({}, None),
    "hf_token": (None, False),
    "interleave_mm_strings": (False,),
    "kv_cache_dtype": ("auto",),
    "kv_cache_memory_bytes": (None,),
    "kv_sharing_fast_prefill": (False,),
    "kv_transfer_config": (None,),
    "limit_mm_per_prompt": ({}, None),
    "load_format": ("auto",),
    "logits_processors": (None,),
    "logprobs_mode": ("raw_logprobs",),
    "long_prefill_token_threshold": (0,),
    "lora_dtype": ("auto",),
    "max_logprobs": (20,),
    "max_long_partial_prefills": (1,),
    "max_lora_rank": (16,),
    "max_loras": (1,),
    "max_model_len": (None,),
    "max_num_batched_tokens": (None,),
    "max_num_partial_prefills": (1,),
    "max_num_seqs": (None,),
    "max_parallel_loading_workers": (None,),
    "media_io_kwargs": ({},),
    "mm_processor_cache_gb": (4,),
    "mm_processor_kwargs": (None,),
    "model_impl": ("auto",),
    "model_loader_extra_config": ({},),
    "multi_step_stream_outputs": (True,),
    "num_gpu_blocks_override": (None,),
    "num_lookahead_slots": (0,),
    "num_scheduler_steps": (1,),
    "otlp_traces_endpoint": (None,),
    "override_generation_config": ({}, None),
    "override_pooler_config": (None,),
    "pipeline_parallel_size": (1,),
    "pooler_config": (None,),
    "preemption_mode": (None,),
    "prefix_caching_hash_algo": ("builtin", "sha256"),
    "quantization": (None,),
    "ray_workers_use_nsight": (False,),
    "revision": (None,),
    "rope_scaling": ({}, None),
    "rope_theta": (None,),
    "runner": ("auto",),
    "scheduler_delay_factor": (0.0,),
    "scheduling_policy": ("fcfs",),
    "served_model_name": (None,),
    "skip_mm_profiling": (False,),
    "skip_tokenizer_init": (False,),
    "speculative_config": (None,),
    "stream_interval": (1,),
    "structured_outputs_config": ({},),
    "swap_space": (4, 4.0, 0),
    "task": ("auto",),
    "tensor_parallel_size": (1,),
    "tokenizer": (None,),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (None,),
    "trust_remote_code": (False,),
    "use_v2_block_manager": (True,),
    "worker_cls": ("auto",),
    "worker_extension_cls": ("",),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", DEFAULTS)
def test_a_default_of_vllm_asks_for_nothing(name: str) -> None:
    """trust_remote_code=False once warned that it had no effect."""
    for value in DEFAULTS[name]:
        chosen = make_config(read_options("m", {name: value}).engine)
        same = {"model_backend", "dtype"}
        assert chosen.model_dump(exclude=same) == make_config({}).model_dump(exclude=same)
        assert chosen.model_fields_set <= same


@pytest.mark.filterwarnings("error")
def test_values_that_are_those_of_an_engine_are_the_engines() -> None:
    for given in ({"enforce_eager": False}, {"enforce_eager": None}, {"gpu_memory_utilization": 0.9}):
        chosen = make_config(read_options("m", given).engine)
        assert (
            chosen.model_dump()
            == make_config({name: value for name, value in given.items() if value is not None}).model_dump()
        )


PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "'n'.*at least 1"),
    ({"n": 129}, "'n'.*at most 128"),
    ({"n": 3, "best_of": 2}, "'best_of'"),
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
    ({"structured_outputs": 5}, "structured_outputs"),
    ({"guided_decoding": {"regexp": "a"}}, "structured_outputs"),
    ({"guided_decoding": {"regex": "a"}, "structured_outputs": {"regex": "a"}}, "by its older name"),
    ({"detokenize": 0}, "'detokenize'"),
    ({"detokenize": False, "stop": "a"}, "'stop' needs 'detokenize'"),
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


KINDS: list[dict[str, Any]] = [
    {"json": {"type": "object"}},
    {"json": '{"type": "object"}'},
    {"regex": "a+"},
    {"choice": ["a", "b"]},
    {"grammar": 'start: "a"'},
    {"json_object": True},
    {"structural_tag": {"triggers": ["<a"], "structures": [{"begin": "<a>", "end": "</a>", "schema": {}}]}},
]
WRONG_KINDS: list[tuple[dict[str, Any], str]] = [
    ({}, "takes one of json, regex, .* and there is none"),
    ({"json_object": False}, "and there is none"),
    ({"json": {}, "regex": "a"}, "and there is json, regex"),
    ({"json": 5}, "'json'"),
    ({"regex": 5}, "'regex'"),
    ({"choice": "a"}, "'choice'"),
    ({"choice": []}, "'choice'"),
    ({"choice": [""]}, "'choice'"),
    ({"grammar": ["a"]}, "'grammar'"),
    ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace is not done"),
    ({"json": {}, "disable_additional_properties": True}, "disable_additional_properties is not done"),
    ({"json": {}, "whitespace_pattern": " "}, "whitespace_pattern is not done"),
]


@pytest.mark.parametrize("given", KINDS, ids=str)
def test_structured_outputs_have_one_kind(given: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**given))
    assert params.body()["structured_outputs"] == given
    older = SamplingParams(guided_decoding=GuidedDecodingParams(**given))
    assert older.body() == params.body() == SamplingParams(structured_outputs=given).body()


@pytest.mark.parametrize(("given", "text"), WRONG_KINDS, ids=str)
def test_a_structured_output_is_checked_when_it_is_given(given: dict[str, Any], text: str) -> None:
    for kind in (StructuredOutputsParams, GuidedDecodingParams):
        with pytest.raises(ValueError, match=text):
            kind(**given)


def test_a_backend_of_guided_decoding_changes_nothing_and_is_said() -> None:
    assert GuidedDecodingParams(regex="a", backend="guidance").backend == "guidance"
    with pytest.warns(UserWarning, match="backend has no effect: llguidance does it"):
        GuidedDecodingParams(regex="a", backend="outlines")
    with pytest.raises(TypeError, match=r"has no parameter 'regx' .did you mean 'regex'"):
        StructuredOutputsParams(regx="a")  # type: ignore[call-arg]


def test_sampling_parameters_of_vllm_that_ask_for_nothing() -> None:
    neutral: dict[str, Any] = {"thinking_token_budget": None, "logits_processors": None, "extra_args": {}}
    assert SamplingParams(**neutral, flat_logprobs=False) == SamplingParams()  # type: ignore[call-arg]
    refused: dict[str, Any] = {
        "thinking_token_budget": 9,
        "logits_processors": [print],
        "flat_logprobs": True,
    }
    for name, value in refused.items():
        with pytest.raises(ValueError, match=f"SamplingParams has no {name}: "):
            SamplingParams(**{name: value})


def test_sampling_parameters_can_be_changed_by_name() -> None:
    """As programs do with those of get_default_sampling_params()."""
    params = SamplingParams()
    params.temperature = 0
    assert params.body()["temperature"] == 0
    with pytest.raises(AttributeError):
        params.temprature = 0  # type: ignore[attr-defined]


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
