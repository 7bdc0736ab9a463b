"""vLLM's options of the model and of what it is loaded from."""

from __future__ import annotations

from catenary_apps.migration.launch import UP, Launch
from catenary_apps.migration.serve.numbers import count
from catenary_apps.migration.serve.rows import (
    Kind,
    ServeOption,
    idle,
    only,
    refuse,
    sets,
    sets_engine,
    supported,
)

_TEST = "tests/unit/catenary/test_migration_serve.py::"
_SETS = f"{_TEST}test_option_sets_a_variable"
MODEL = f"{UP}MODEL"
MODEL_OPTION = "--model"
# vLLM's words for a task (--task), a way to run (--runner) and what a model is made into (--convert).
_TASKS = {
    "auto": "auto",
    "none": "auto",
    "generate": "generate",
    "embed": "embed",
    "embedding": "embed",
    "score": "score",
    "classify": "classify",
    # A pooling runner does what the checkpoint is for.
    "pooling": "auto",
}


def _model_length(launch: Launch, option: str, value: str) -> None:
    if value.lower() in ("auto", "-1"):
        return
    try:
        launch.ask(f"{UP}MAX_MODEL_LEN", str(count(value)))
    except ValueError as error:
        raise refuse(option, value, str(error)) from None


def _tokenizer(launch: Launch, option: str, value: str) -> None:
    if value != launch.asked(MODEL):
        raise refuse(option, value, "the tokenizer is that of the model's directory")


def _names(launch: Launch, option: str, value: str) -> None:
    first, *others = value.split(",")
    launch.ask(f"{UP}SERVED_MODEL_NAME", first)
    if aliases := dict.fromkeys(other for other in others if other != first):
        launch.ask(f"{UP}MODEL_ALIAS", ",".join(aliases))


def _task(launch: Launch, option: str, value: str) -> None:
    task = _TASKS.get(value.lower())
    if task is None:
        raise refuse(option, value, f"a model is served to {', '.join(sorted(set(_TASKS.values())))}")
    if task != "auto":
        launch.ask(f"{UP}TASK", task)


OPTIONS: tuple[ServeOption, ...] = (
    sets(MODEL, "`--model`, or the word without a name", _SETS, MODEL_OPTION),
    supported(
        _names,
        "`--served-model-name`, `--model-alias` for further names; answers have the name asked for",
        f"{_TEST}test_names_and_lengths",
        "--served-model-name",
        kind=Kind.WORDS,
    ),
    supported(
        _model_length,
        "`--max-model-len`; `16k` and `16K` too",
        f"{_TEST}test_names_and_lengths",
        "--max-model-len",
    ),
    sets(f"{UP}DTYPE", "`--dtype`", _SETS, "--dtype", half="float16", float="float32"),
    supported(
        _tokenizer,
        "the model's own; another one is refused",
        f"{_TEST}test_tokenizer_is_the_models",
        "--tokenizer",
    ),
    sets("HF_HUB_CACHE", "where models of the Hugging Face hub are kept", _SETS, "--download-dir"),
    sets_engine("model_backend", _SETS, "--model-impl", vllm="decoder"),
    sets_engine("weights_load_device", _SETS, "--weights-load-device", hpu="device"),
    sets(f"{UP}CHAT_TEMPLATE", "`--chat-template`; a file", _SETS, "--chat-template"),
    supported(
        _task,
        "`--task`; `embedding` and `pooling` too. `reward` is refused",
        f"{_TEST}test_tasks",
        "--task",
        "--runner",
        "--convert",
    ),
    only(
        "quantized models are not done yet, FP8 among them; CATENARY_ENGINE_QUANTIZATION=int8 "
        "or int4 packs plain weights on a CPU",
        ("none",),
        "--quantization",
        "-q",
    ),
    only("the KV cache has the type of the computation", ("auto", "bfloat16"), "--kv-cache-dtype"),
    only("weights come from safetensors files", ("auto", "safetensors", "hf"), "--load-format"),
    only(
        "download that revision and give its directory",
        ("main", "master"),
        "--revision",
        "--tokenizer-revision",
        "--code-revision",
    ),
    only("the fast tokenizer is the one there is", ("auto", "fast", "hf"), "--tokenizer-mode"),
    only(
        "defaults of sampling are those of the model's generation_config.json",
        ("auto",),
        "--generation-config",
    ),
    only("edit generation_config.json in the model's directory", (), "--override-generation-config"),
    only(
        "edit config.json in the model's directory",
        (),
        "--hf-overrides",
        "--rope-scaling",
        "--rope-theta",
        "--hf-config-path",
    ),
    only("LoRA adapters are not done yet", ("false",), "--enable-lora", kind=Kind.FLAG),
    only("LoRA adapters are not done yet", (), "--lora-modules", kind=Kind.WORDS),
    only("LoRA adapters are not done yet", ("1",), "--max-loras"),
    only("LoRA adapters are not done yet", ("16",), "--max-lora-rank"),
    only("LoRA adapters are not done yet", ("auto",), "--lora-dtype"),
    only("LoRA adapters are not done yet", (), "--max-cpu-loras", "--default-mm-loras"),
    only(
        "LoRA adapters are not done yet",
        ("false",),
        "--enable-lora-bias",
        "--fully-sharded-loras",
        kind=Kind.FLAG,
    ),
    only("prompt adapters are not done yet", ("false",), "--enable-prompt-adapter", kind=Kind.FLAG),
    only("a prompt is a text or token ids", ("false",), "--enable-prompt-embeds", kind=Kind.FLAG),
    only("the KV cache has the type of the computation", ("false",), "--calculate-kv-scales", kind=Kind.FLAG),
    only("config.json is in the form of transformers", ("auto", "hf"), "--config-format"),
    only("no code of others runs in the engine", (), "--logits-processors", "--logits-processor-pattern"),
    only("weights come from safetensors files", (), "--model-loader-extra-config", "--ignore-patterns"),
    only("the engine chooses its kernels by the device", (), "--attention-backend"),
    only(
        "log probabilities are the model's own, before temperature and filters",
        ("raw_logprobs",),
        "--logprobs-mode",
    ),
    only(
        "speculative decoding is not done yet",
        (),
        "--speculative-config",
        "--speculative-model",
        "--num-speculative-tokens",
    ),
    only("the tokenizer is needed for text", ("false",), "--skip-tokenizer-init", kind=Kind.FLAG),
    only(
        "a model's window is part of what it computes", ("false",), "--disable-sliding-window", kind=Kind.FLAG
    ),
    only(
        "how states are pooled is read from the files of sentence-transformers",
        (),
        "--override-pooler-config",
        "--pooler-config",
    ),
    idle(
        "code from a model's repository is never run; a model that needs it is refused",
        "--trust-remote-code",
        kind=Kind.FLAG,
    ),
    idle(
        "models take text alone so far",
        "--limit-mm-per-prompt",
        "--mm-processor-kwargs",
        "--mm-processor-cache-gb",
        "--mm-encoder-tp-mode",
        "--media-io-kwargs",
        "--allowed-local-media-path",
        nothing={
            "--allowed-local-media-path": ("",),
            "--mm-processor-cache-gb": ("4",),
            "--mm-encoder-tp-mode": ("weights",),
        },
    ),
    idle(
        "models take text alone so far",
        "--disable-mm-preprocessor-cache",
        "--disable-chunked-mm-input",
        "--interleave-mm-strings",
        "--skip-mm-profiling",
        kind=Kind.FLAG,
    ),
    idle("a request without a seed is drawn anew; one with a seed repeats", "--seed", nothing=("0",)),
    idle("set HF_TOKEN", "--hf-token", nothing=("false",)),
)
