"""The letters of vLLM's start scripts for Gaudi as variables of a deployment."""

from __future__ import annotations

import pytest

from catenary.config import ConfigError
from catenary_apps.migration.letters import launch_of, read_letters

DEFAULTS = {
    "CATENARY_UP_MODEL": "m",
    "CATENARY_UP_DEVICE": "hpu",
    "CATENARY_UP_HOST": "127.0.0.1",
    "CATENARY_UP_PORT": "30001",
    "CATENARY_UP_DTYPE": "bfloat16",
    "CATENARY_UP_MAX_MODEL_LEN": "16384",
    "CATENARY_UP_GPU_MEMORY_UTILIZATION": "0.9",
    "CATENARY_ENGINE_BLOCK_SIZE": "128",
    "CATENARY_ENGINE_ALLOW_LONG_MAX_MODEL_LEN": "true",
    "CATENARY_ENGINE_MAX_NUM_BATCHED_TOKENS": "16384",
    "CATENARY_ENGINE_MAX_NUM_SEQS": "128",
    "CATENARY_ENGINE_MAX_PREFILL_BATCH": "1",
    "CATENARY_ENGINE_MAX_CAPTURE_TOKENS": "8192",
    "CATENARY_ENGINE_BUCKETING_STRATEGY": "padding",
    "CATENARY_ENGINE_BUCKETING_PAD_RATIO": "0.25",
    "PT_HPU_LAZY_MODE": "1",
}


def variables(*words: str, **environment: str) -> dict[str, str]:
    return launch_of(read_letters(["-w", "m", *words])).variables(environment)


def changes(*words: str, **environment: str) -> dict[str, str]:
    found = variables(*words, **environment)
    return {name: value for name, value in found.items() if DEFAULTS.get(name) != value}


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        launch_of(read_letters(words))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_those_of_the_script() -> None:
    assert variables() == DEFAULTS


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-a 0.0.0.0:8080", {"CATENARY_UP_HOST": "0.0.0.0", "CATENARY_UP_PORT": "8080"}),
        ("-a [::1]:8080", {"CATENARY_UP_HOST": "::1", "CATENARY_UP_PORT": "8080"}),
        ("-d float16", {"CATENARY_UP_DTYPE": "float16"}),
        ("-b 64", {"CATENARY_ENGINE_MAX_NUM_SEQS": "64"}),
        ("-p 8", {"CATENARY_ENGINE_MAX_PREFILL_BATCH": "8"}),
        ("-g 4096", {"CATENARY_ENGINE_MAX_CAPTURE_TOKENS": "4096"}),
        ("-u 0.85", {"CATENARY_UP_GPU_MEMORY_UTILIZATION": "0.85"}),
        ("-s", {"CATENARY_ENGINE_WARMUP": "skip"}),
        ("-t 1", {}),
        ("-sb64", {"CATENARY_ENGINE_WARMUP": "skip", "CATENARY_ENGINE_MAX_NUM_SEQS": "64"}),
    ],
)
def test_letters_set_variables(words: str, expected: dict[str, str]) -> None:
    assert changes(*words.split()) == expected
    assert "CATENARY_ENGINE_MAX_PREFILL_BATCH" not in variables("-p", "")


def test_length_is_rounded_up_to_blocks() -> None:
    found = variables("-x", "5000")
    assert found["CATENARY_UP_MAX_MODEL_LEN"] == "5120"
    assert found["CATENARY_ENGINE_MAX_NUM_BATCHED_TOKENS"] == "5120"
    found = variables("-x", "129")
    assert found["CATENARY_UP_MAX_MODEL_LEN"] == "256"
    assert found["CATENARY_ENGINE_MAX_NUM_BATCHED_TOKENS"] == "2048"


@pytest.mark.parametrize(
    ("words", "length", "tokens", "together"),
    [
        # A release's own defaults: 4 to 1,024 and 4 to 2,048.
        ("-i 4,1024", "3072", "3072", "24"),
        ("-o 4,2048", "3072", "3072", "1"),
        ("-i 4,1024 -o 4,2048 -p 2", "3072", "3072", "2"),
        ("-i 100,300 -o 1,50", "384", "2048", "16"),
        ("-i 4096,4096 -o 1,1", "4224", "4224", "1"),
        ("-i 1,100000 -o 1,1", "100096", "100096", "256"),
    ],
)
def test_ranges_of_lengths(words: str, length: str, tokens: str, together: str) -> None:
    found = variables(*words.split())
    assert found["CATENARY_UP_MAX_MODEL_LEN"] == length
    assert found["CATENARY_ENGINE_MAX_NUM_BATCHED_TOKENS"] == tokens
    assert found["CATENARY_ENGINE_MAX_PREFILL_BATCH"] == together


def test_letters_of_other_releases_with_nothing_to_do() -> None:
    launch = launch_of(read_letters(["-w", "m", "-z", "-n", "1"]))
    assert launch.variables({}) == DEFAULTS
    assert launch.warnings == ["-z has no effect: padding is masked, and never set to zero"]


def test_ranges_go_with_the_scripts_strategy() -> None:
    found = variables(VLLM_DECODE_BLOCK_BUCKET_STEP="256")
    assert found["CATENARY_ENGINE_BUCKETING_STRATEGY"] == "padding"
    named = variables(VLLM_DECODE_BLOCK_BUCKET_STEP="256", VLLM_BUCKETING_STRATEGY="lin")
    assert "CATENARY_ENGINE_BUCKETING_STRATEGY" not in named


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "fp32"),
        ("/models/Qwen2-7B", "fp32"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "fp32"),
        ("/data/qwen2.5-7b-instruct/", "fp32"),
        ("Qwen/Qwen3-8B", None),
        ("meta-llama/Llama-3.1-8B-Instruct", None),
        ("/models/qwen2-7b/llama", None),
    ],
)
def test_the_scripts_rule_of_scores_by_model(model: str, expected: str | None) -> None:
    launch = launch_of(read_letters(["-w", model]))
    assert launch.variables({}).get("CATENARY_ENGINE_ATTENTION_SOFTMAX") == expected
    # The operator's own word counts, in vLLM's words too.
    for given in ({"VLLM_FP32_SOFTMAX": "false"}, {"CATENARY_ENGINE_ATTENTION_SOFTMAX": "fast"}):
        assert "CATENARY_ENGINE_ATTENTION_SOFTMAX" not in launch.variables(given)
    if expected is not None:
        assert "CATENARY_ENGINE_ATTENTION_SOFTMAX=fp32" in launch.command(launch.variables({}))


def test_module_id() -> None:
    assert changes("-m", "3") == {"HLS_MODULE_ID": "3"}
    assert changes("-m", "None") == {}
    assert refusal("-w", "m", "-m", "0,1") == (
        "-m 0,1: an engine on several cards is not done yet; name one module"
    )
    for bad in ("8", "x", "-1"):
        assert refusal("-w", "m", "-m", bad).startswith("-m")


def test_padding_limit() -> None:
    assert changes("-l", "0.1") == {"CATENARY_ENGINE_BUCKETING_PAD_RATIO": "0.1"}
    # Asked for, it wins; the script's default does not.
    environment = {"CATENARY_ENGINE_BUCKETING_STRATEGY": "exponential"}
    assert variables("-l", "0.1", **environment)["CATENARY_ENGINE_BUCKETING_STRATEGY"] == "padding"
    for given in (environment, {"VLLM_BUCKETING_STRATEGY": "lin"}, {"VLLM_BUCKETING_FROM_FILE": "f"}):
        assert not [name for name in variables(**given) if "BUCKETING" in name]
    for bad in ("0.6", "x", "-0.1", "nan"):
        assert refusal("-w", "m", "-l", bad).startswith("-l")


def test_recipe_cache() -> None:
    assert changes("-c", "/cache") == {
        "CATENARY_ENGINE_RECIPE_CACHE": "/cache",
        "CATENARY_ENGINE_RECIPE_CACHE_MIB": "40960",
    }
    found = variables("--r1", "-t", "1", "-c", "/cache")
    assert found["CATENARY_ENGINE_RECIPE_CACHE_MIB"] == "16384"


def test_profile_is_a_trace() -> None:
    found = launch_of(read_letters(["-w", "/models/Qwen2", "-f"])).variables({})
    assert found["CATENARY_ENGINE_TRACE_STEPS"] == "serve_Qwen2_profile.json"


def test_extra_options_are_those_of_vllm() -> None:
    assert changes("-e", "--max-num-seqs 7 --device cpu --chat-template 'a b'") == {
        "CATENARY_ENGINE_MAX_NUM_SEQS": "7",
        "CATENARY_UP_DEVICE": "cpu",
        "CATENARY_UP_CHAT_TEMPLATE": "a b",
    }
    assert refusal("-w", "m", "-e", "--quantization inc").startswith("--quantization inc: ")
    assert refusal("-w", "m", "-e", "another-model").startswith("-e 'another-model': must begin")
    assert "quotation mark" in refusal("-w", "m", "-e", "--chat-template 'a")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("-t 2", "-t 2: an engine on several cards is not done yet"),
        ("-d fp8", "-d fp8: FP8 is not done yet"),
        ("-d awq", "-d awq: quantized models are not done yet"),
        ("-d int9", "-d 'int9': must be"),
        ("-q /quant.json", "-q: FP8 is not done yet"),
        ("--r1", "--r1: the script takes eight cards"),
        ("--r1 -t 1 -q", "-q: FP8 is not done yet"),
        ("--r1 -t 8", "-t 8: an engine on several cards"),
        ("--r1 -t 1 -x 5", "option -x not recognized (the DeepSeek-R1 script has -w, -u,"),
        ("-r 4", "option -r not recognized (start_gaudi_vllm_server.sh has -w, -t,"),
        ("-n 8", "-n 8: an engine on several cards is not done yet"),
        ("-i 1024", "-i '1024': must be MIN,MAX"),
        ("-i 9,4", "-i '9,4': the first number must not be above the second"),
        ("-o 0,4", "-o '0': must be a whole number, 1 to"),
        ("-i 4,1024 -x 4096", "-i says the length of a sequence, and so does -x: give one of them"),
        ("-b 0", "-b '0': must be a whole number, 1 to 4096"),
        ("-a 8000", "-a '8000': must be ADDRESS:PORT"),
        ("-a host:99999", "-a '99999': must be a whole number"),
        ("-u 2", "-u '2': must be a number, 0 to 1.0"),
        ("-x long", "-x 'long': must be a whole number"),
        ("-b", "option -b requires argument"),
        ("more", "unexpected argument 'more'"),
    ],
)
def test_what_is_not_done_is_refused_by_name(words: str, text: str) -> None:
    assert refusal("-w", "m", *words.split()).startswith(text)


def test_model_is_needed() -> None:
    assert refusal("-b", "4").startswith("-w is missing")


def test_r1_letters() -> None:
    assert variables("--r1", "-t", "1") == {
        "CATENARY_UP_MODEL": "m",
        "CATENARY_UP_DEVICE": "hpu",
        "CATENARY_UP_HOST": "0.0.0.0",
        "CATENARY_UP_PORT": "8688",
        "CATENARY_UP_MAX_MODEL_LEN": "16384",
        "CATENARY_UP_GPU_MEMORY_UTILIZATION": "0.85",
        "CATENARY_ENGINE_BLOCK_SIZE": "128",
        "CATENARY_ENGINE_MAX_NUM_BATCHED_TOKENS": "16384",
        "CATENARY_ENGINE_MAX_NUM_SEQS": "64",
        "CATENARY_ENGINE_MAX_PREFILL_BATCH": "1",
        "CATENARY_ENGINE_GRAPH_RESERVED_MEM": "0.2",
        "CATENARY_ENGINE_GRAPH_PROMPT_RATIO": "0",
        "CATENARY_ENGINE_BUCKETING_STRATEGY": "padding",
        "CATENARY_ENGINE_BUCKETING_PAD_RATIO": "0.25",
        "PT_HPU_LAZY_MODE": "1",
    }
    found = variables("--r1", "-t1", "-u127.0.0.1", "-p9", "-l32768", "-b4", "-m2", "-s")
    assert found["CATENARY_UP_HOST"] == "127.0.0.1"
    assert found["CATENARY_UP_PORT"] == "9"
    assert found["CATENARY_UP_MAX_MODEL_LEN"] == "32768"
    assert found["CATENARY_UP_GPU_MEMORY_UTILIZATION"] == "0.7"
    assert found["CATENARY_ENGINE_MAX_NUM_SEQS"] == "4"
    assert found["CATENARY_ENGINE_MAX_PREFILL_BATCH"] == "2"
    assert found["CATENARY_ENGINE_WARMUP"] == "skip"


def test_defaults_give_way_to_variables_and_letters_do_not() -> None:
    environment = {
        "CATENARY_UP_DEVICE": "cpu",
        "CATENARY_ENGINE_MAX_MODEL_LEN": "4096",
        "CATENARY_ENGINE_MAX_NUM_SEQS": "8",
        "VLLM_GPU_MEMORY_UTILIZATION": "0.5",
        "VLLM_PROMPT_BS_BUCKET_MAX": "4",
        "VLLM_MAX_SEQ_LEN_TO_CAPTURE": "100",
        "PT_HPU_LAZY_MODE": "0",
    }
    left = {
        "CATENARY_UP_DEVICE",
        "CATENARY_UP_MAX_MODEL_LEN",
        "CATENARY_ENGINE_MAX_NUM_SEQS",
        "CATENARY_UP_GPU_MEMORY_UTILIZATION",
        "CATENARY_ENGINE_MAX_PREFILL_BATCH",
        "CATENARY_ENGINE_MAX_CAPTURE_TOKENS",
        "PT_HPU_LAZY_MODE",
    }
    assert variables(**environment).keys() == DEFAULTS.keys() - left
    assert variables("-b", "3", **environment)["CATENARY_ENGINE_MAX_NUM_SEQS"] == "3"
