"""The command line of `vllm serve` as variables of a deployment."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary.config import EMPTY_KEY, ConfigError
from catenary_apps.migration.launch import Launch
from catenary_apps.migration.serve import SERVE_OPTIONS, parse_serve
from catenary_apps.migration.serve_options import Kind, ServeOption
from services.engine.vllm_variables import Status

DONE = [option for option in SERVE_OPTIONS if option.row.status is Status.SUPPORTED]
REFUSED = [option for option in SERVE_OPTIONS if option.row.status is Status.REFUSED]
IDLE = [option for option in SERVE_OPTIONS if option.row.status is Status.NOT_NEEDED]


def launched(*words: str) -> Launch:
    launch = Launch()
    parse_serve(words, launch)
    return launch


def variables(*words: str) -> dict[str, str]:
    return launched(*words).variables({})


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        launched(*words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "variable", "value"),
    [
        ("--model group/name", "CATENARY_UP_MODEL", "group/name"),
        ("group/name", "CATENARY_UP_MODEL", "group/name"),
        ("--dtype half", "CATENARY_UP_DTYPE", "float16"),
        ("--dtype float", "CATENARY_UP_DTYPE", "float32"),
        ("--dtype bfloat16", "CATENARY_UP_DTYPE", "bfloat16"),
        ("--download-dir /models", "HF_HUB_CACHE", "/models"),
        ("--model-impl transformers", "CATENARY_ENGINE_MODEL_BACKEND", "transformers"),
        ("--model-impl vllm", "CATENARY_ENGINE_MODEL_BACKEND", "decoder"),
        ("--weights-load-device cpu", "CATENARY_ENGINE_WEIGHTS_LOAD_DEVICE", "cpu"),
        ("--weights-load-device hpu", "CATENARY_ENGINE_WEIGHTS_LOAD_DEVICE", "device"),
        ("--tool-call-parser hermes", "CATENARY_UP_TOOL_PARSER", "hermes"),
        ("--tool-call-parser granite-20b-fc", "CATENARY_UP_TOOL_PARSER", "granite-20b-fc"),
        ("--tool-call-parser minimax_m2", "CATENARY_UP_TOOL_PARSER", "minimax_m2"),
        ("--reasoning-parser qwen3", "CATENARY_UP_REASONING_PARSER", "qwen3"),
        ("--trust-request-chat-template", "CATENARY_TOKENIZER_ALLOW_REQUEST_TEMPLATES", "true"),
        ("--chat-template t.jinja", "CATENARY_UP_CHAT_TEMPLATE", "t.jinja"),
        ("--gpu-memory-utilization 0.8", "CATENARY_UP_GPU_MEMORY_UTILIZATION", "0.8"),
        ("--gpu_memory_utilization=0.8", "CATENARY_UP_GPU_MEMORY_UTILIZATION", "0.8"),
        ("--gpu-memory-util 0.8", "CATENARY_UP_GPU_MEMORY_UTILIZATION", "0.8"),
        ("--max-num-seqs 64", "CATENARY_ENGINE_MAX_NUM_SEQS", "64"),
        ("--max-num-prefill-seqs 4", "CATENARY_ENGINE_MAX_PREFILL_BATCH", "4"),
        ("--block-size 128", "CATENARY_ENGINE_BLOCK_SIZE", "128"),
        ("--enable-prefix-caching", "CATENARY_ENGINE_ENABLE_PREFIX_CACHING", "true"),
        ("--no-enable-prefix-caching", "CATENARY_ENGINE_ENABLE_PREFIX_CACHING", "false"),
        ("--max-seq-len-to-capture 4096", "CATENARY_ENGINE_MAX_CAPTURE_TOKENS", "4096"),
        ("--enforce-eager", "CATENARY_ENGINE_ENFORCE_EAGER", "true"),
        ("--no-async-scheduling", "CATENARY_ENGINE_ASYNC_STEPPING", "false"),
        ("--device hpu", "CATENARY_UP_DEVICE", "hpu"),
        ("-dp 2", "CATENARY_UP_ENGINES", "2"),
        ("--host 0.0.0.0", "CATENARY_UP_HOST", "0.0.0.0"),
        ("--port 9000", "CATENARY_UP_PORT", "9000"),
        ("--ssl-certfile c", "CATENARY_UP_SSL_CERTFILE", "c"),
        ("--ssl-keyfile k", "CATENARY_UP_SSL_KEYFILE", "k"),
        ("--ssl-ca-certs a", "CATENARY_GATEWAY_SSL_CA_CERTS", "a"),
        ("--api-server-count 3", "CATENARY_UP_GATEWAYS", "3"),
    ],
)
def test_option_sets_a_variable(words: str, variable: str, value: str) -> None:
    assert variables(*words.split()) == {variable: value}


def test_tasks() -> None:
    for word in ("embed", "embedding"):
        assert variables("m", "--task", word)["CATENARY_UP_TASK"] == "embed"
    unchanged = variables("m", "--task", "auto", "--runner", "pooling", "--convert", "none")
    assert "CATENARY_UP_TASK" not in unchanged
    assert variables("m", "--task", "classify")["CATENARY_UP_TASK"] == "classify"
    assert "served to auto, classify, embed, generate, score" in refusal("m", "--task", "reward")


def test_names_and_lengths() -> None:
    assert variables("--max-model-len", "16k") == {"CATENARY_UP_MAX_MODEL_LEN": "16000"}
    assert variables("--max-model-len", "16K") == {"CATENARY_UP_MAX_MODEL_LEN": "16384"}
    assert variables("--max-model-len", "1.5k") == {"CATENARY_UP_MAX_MODEL_LEN": "1500"}
    assert variables("--max-model-len", "auto") == variables("--max-model-len", "-1") == {}
    assert variables("--kv-cache-memory-bytes", "2G") == {"CATENARY_ENGINE_KV_CACHE_GIB": "2.000000"}
    assert variables("--max-num-batched-tokens", "8K") == {"CATENARY_ENGINE_MAX_NUM_BATCHED_TOKENS": "8192"}
    assert variables("--served-model-name", "m") == {"CATENARY_UP_SERVED_MODEL_NAME": "m"}
    assert variables("--served-model-name", "a", "org/b:8b", "c d", "a") == {
        "CATENARY_UP_SERVED_MODEL_NAME": "a",
        "CATENARY_UP_MODEL_ALIAS": "org/b:8b,c d",
    }
    for bad in ("long", "1.5", "", "-7", "1e3", "9" * 30):
        assert refusal(f"--max-model-len={bad}").startswith("--max-model-len")


def test_lists() -> None:
    assert variables("--api-key", "one", "two") == {"CATENARY_UP_API_KEY": "one,two"}
    origins = {"CATENARY_UP_CORS_ALLOW_ORIGINS": "https://a,https://b"}
    assert variables("--allowed-origins", '["https://a", "https://b"]') == origins
    for bad in ("[1]", "[", '["a", null]'):
        assert "JSON list" in refusal("--allowed-origins", bad)


@pytest.mark.parametrize(
    "words", [["--api-key", ""], ["--api-key="], ["--api-key", "a", ""], ["--api-key", " "]]
)
def test_an_empty_key_ends_the_start(words: list[str]) -> None:
    assert refusal("m", *words) == f"--api-key: {EMPTY_KEY}"


@pytest.mark.parametrize("line", ["api-key: ''", "api_key: ' '", "api-key:", "api-key: ['']", "api-key: []"])
def test_an_empty_key_in_a_file_ends_the_start(line: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(line + "\n")
    assert refusal("m", "--config", str(file)).startswith("--api-key: ")


def test_tokenizer_is_the_models() -> None:
    assert variables("--tokenizer", "m", "--model", "m") == {"CATENARY_UP_MODEL": "m"}
    assert refusal("--tokenizer", "other", "m").startswith("--tokenizer other: ")


@pytest.mark.parametrize("option", REFUSED, ids=lambda option: option.names[0])
def test_what_is_not_done_is_refused_by_name(option: ServeOption) -> None:
    for name in option.names:
        words = [name] if option.kind is Kind.FLAG else [name, "something"]
        assert refusal(*words).startswith(name)


def test_values_that_change_nothing_are_taken() -> None:
    words = "-tp 1 --pipeline-parallel-size 1 --quantization None --kv-cache-dtype auto --load-format auto"
    words += " --task auto --no-enable-lora --generation-config auto --swap-space 0"
    launch = launched(*words.split())
    assert launch.variables({}) == {}
    assert launch.warnings == []
    empty = "--no-trust-remote-code --hf-overrides {} --limit-mm-per-prompt {} --cpu-offload-gb 0.0 -O {}"
    empty += " --swap-space 4.0 --num-scheduler-steps 1 --scheduler-delay-factor 0 --enable-chunked-prefill"
    assert launched(*empty.split()).warnings == []
    (line,) = launched("--scheduler-delay-factor", "1").warnings
    assert line.startswith("--scheduler-delay-factor has no effect")
    assert refusal("--tensor-parallel-size", "8").startswith("--tensor-parallel-size 8: an engine on several")


def test_scheduling_is_by_priority() -> None:
    for policy in ("priority", "fcfs"):
        launch = launched("--scheduling-policy", policy)
        assert (launch.variables({}), launch.warnings) == ({}, [])
    assert "must be priority or fcfs" in refusal("--scheduling-policy", "lottery")


@pytest.mark.parametrize("name", [name for option in IDLE for name in option.names])
def test_option_without_effect_is_one_warning_line(name: str) -> None:
    (option,) = (entry for entry in IDLE if name in entry.names)
    said = {"--enable-chunked-prefill": "--no-enable-chunked-prefill"}
    said |= {"--use-v2-block-manager": "--no-use-v2-block-manager"}
    launch = launched(*([said.get(name, name)] if option.kind is Kind.FLAG else [name, "17"]))
    assert launch.variables({}) == {}
    warned = [line.split(":")[0] for line in launch.warnings]
    # On one card it makes no difference either way.
    assert warned == ([] if name == "--disable-custom-all-reduce" else [f"{name} has no effect"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--max-num-seq", "--max-num-seqs"),
        ("--max-modle-len 5", "did you mean --max-model-len?"),
        ("--port", "--port: needs a value"),
        ("--port --host a", "--port: needs a value"),
        ("--api-key --host a", "--api-key: needs a value"),
        ("--enforce-eager=1", "--enforce-eager: takes no value"),
        ("--max", "could be"),
        ("-z 1", "unknown option -z"),
    ],
)
def test_command_line_that_is_none(words: str, text: str) -> None:
    if words == "--max-num-seq":
        assert variables(words, "3") == {"CATENARY_ENGINE_MAX_NUM_SEQS": "3"}
    else:
        assert text in refusal(*words.split())


def test_file_of_options_counts_before_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(
        "model: a\nmax-num-seqs: 4\nport: 9\nenable-prefix-caching: false\napi-key: [x, y]\ndtype: null\n"
    )
    assert variables("--config", str(file), "--port", "10") == {
        "CATENARY_UP_MODEL": "a",
        "CATENARY_UP_PORT": "10",
        "CATENARY_UP_API_KEY": "x,y",
        "CATENARY_ENGINE_MAX_NUM_SEQS": "4",
        "CATENARY_ENGINE_ENABLE_PREFIX_CACHING": "false",
    }
    for text in ("- a", "a: {b: c}", "a: [", "tp: 1"):
        file.write_text(text)
        assert refusal("--config", str(file))
    file.write_text("x" * (2 << 20))
    assert "larger than" in refusal("--config", str(file))
    assert "--config" in refusal("--config", str(tmp_path / "none"))


def test_secrets_are_not_shown() -> None:
    launch = launched("m", "--api-key", "hidden-key")
    found = launch.variables({})
    assert "hidden-key" not in launch.command(found)
    assert "hidden-key" not in launch.flags(found)
    assert "hidden-key" not in refusal("--api-kex", "hidden-key")


@given(
    st.lists(
        st.sampled_from([n for o in SERVE_OPTIONS for n in o.names] + ["1", "x", "--config"]), max_size=6
    )
)
def test_any_words_give_a_launch_or_one_line(words: list[str]) -> None:
    text = ""
    try:
        launched(*words).variables({})
    except ConfigError as error:
        text = str(error)
    assert "\n" not in text
