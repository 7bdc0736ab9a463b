"""The options of `vllm serve`, by heading, each with its counterpart here."""

from __future__ import annotations

import json

from catenary.config import EMPTY_KEY
from catenary_apps.migration.launch import API_KEY, ENGINE, GATEWAY, UP, Launch
from catenary_apps.migration.serve_options import (
    Kind,
    ServeOption,
    count,
    idle,
    only,
    refuse,
    sets,
    sets_engine,
    supported,
)

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


def _count(option: str, value: str) -> int:
    try:
        return count(value)
    except ValueError as error:
        raise refuse(option, value, str(error)) from None


def _model_length(launch: Launch, option: str, value: str) -> None:
    if value.lower() not in ("auto", "-1"):
        launch.ask(f"{UP}MAX_MODEL_LEN", str(_count(option, value)))


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


MODEL_OPTIONS: tuple[ServeOption, ...] = (
    sets(MODEL, "`--model`, or the word without a name", MODEL_OPTION),
    supported(
        _names,
        "`--served-model-name`, `--model-alias` for further names; answers have the name asked for",
        "test_names_and_lengths",
        "--served-model-name",
        kind=Kind.WORDS,
    ),
    supported(
        _model_length, "`--max-model-len`; `16k` and `16K` too", "test_names_and_lengths", "--max-model-len"
    ),
    sets(f"{UP}DTYPE", "`--dtype`", "--dtype", half="float16", float="float32"),
    supported(
        _tokenizer, "the model's own; another one is refused", "test_tokenizer_is_the_models", "--tokenizer"
    ),
    sets("HF_HUB_CACHE", "where models of the Hugging Face hub are kept", "--download-dir"),
    sets_engine("model_backend", "--model-impl", vllm="decoder"),
    sets_engine("weights_load_device", "--weights-load-device", hpu="device"),
    sets(f"{UP}CHAT_TEMPLATE", "`--chat-template`; a file", "--chat-template"),
    supported(
        _task,
        "`--task`; `embedding` and `pooling` too. `reward` is refused",
        "test_tasks",
        "--task --runner --convert",
    ),
    only(
        "quantized models are not done yet, FP8 among them; CATENARY_ENGINE_QUANTIZATION=int8 "
        "or int4 packs plain weights on a CPU",
        "--quantization -q",
        ("none",),
    ),
    only("the KV cache has the type of the computation", "--kv-cache-dtype", ("auto", "bfloat16")),
    only("weights come from safetensors files", "--load-format", ("auto", "safetensors", "hf")),
    only(
        "download that revision and give its directory",
        "--revision --tokenizer-revision --code-revision",
        ("main", "master"),
    ),
    only("the fast tokenizer is the one there is", "--tokenizer-mode", ("auto", "fast", "hf")),
    only(
        "defaults of sampling are those of the model's generation_config.json",
        "--generation-config",
        ("auto",),
    ),
    only("edit generation_config.json in the model's directory", "--override-generation-config"),
    only(
        "edit config.json in the model's directory",
        "--hf-overrides --rope-scaling --rope-theta --hf-config-path",
    ),
    only("LoRA adapters are not done yet", "--enable-lora", kind=Kind.FLAG),
    only("LoRA adapters are not done yet", "--lora-modules", kind=Kind.WORDS),
    only("LoRA adapters are not done yet", "--max-loras", ("1",)),
    only("LoRA adapters are not done yet", "--max-lora-rank", ("16",)),
    only("LoRA adapters are not done yet", "--lora-dtype", ("auto",)),
    only("LoRA adapters are not done yet", "--max-cpu-loras --default-mm-loras"),
    only("LoRA adapters are not done yet", "--enable-lora-bias --fully-sharded-loras", kind=Kind.FLAG),
    only("prompt adapters are not done yet", "--enable-prompt-adapter", kind=Kind.FLAG),
    only("a prompt is a text or token ids", "--enable-prompt-embeds", kind=Kind.FLAG),
    only("the KV cache has the type of the computation", "--calculate-kv-scales", kind=Kind.FLAG),
    only("config.json is in the form of transformers", "--config-format", ("auto", "hf")),
    only("no code of others runs in the engine", "--logits-processors --logits-processor-pattern"),
    only("weights come from safetensors files", "--model-loader-extra-config --ignore-patterns"),
    only("the engine chooses its kernels by the device", "--attention-backend"),
    only(
        "log probabilities are the model's own, before temperature and filters",
        "--logprobs-mode",
        ("raw_logprobs",),
    ),
    only(
        "speculative decoding is not done yet",
        "--speculative-config --speculative-model --num-speculative-tokens",
    ),
    only("the tokenizer is needed for text", "--skip-tokenizer-init", kind=Kind.FLAG),
    only("a model's window is part of what it computes", "--disable-sliding-window", kind=Kind.FLAG),
    only(
        "how states are pooled is read from the files of sentence-transformers",
        "--override-pooler-config --pooler-config",
    ),
    idle(
        "code from a model's repository is never run; a model that needs it is refused",
        "--trust-remote-code",
        kind=Kind.FLAG,
    ),
    idle(
        "models take text alone so far",
        "--limit-mm-per-prompt --mm-processor-kwargs --mm-processor-cache-gb=4 "
        "--mm-encoder-tp-mode=weights --media-io-kwargs --allowed-local-media-path=",
    ),
    idle(
        "models take text alone so far",
        "--disable-mm-preprocessor-cache --disable-chunked-mm-input --interleave-mm-strings "
        "--skip-mm-profiling",
        kind=Kind.FLAG,
    ),
    idle("a request without a seed is drawn anew; one with a seed repeats", "--seed=0"),
    idle("set HF_TOKEN", "--hf-token=false"),
)


def _kv_bytes(launch: Launch, option: str, value: str) -> None:
    launch.ask(f"{ENGINE}KV_CACHE_GIB", f"{_count(option, value) / 2**30:.6f}")


def _batched_tokens(launch: Launch, option: str, value: str) -> None:
    launch.ask(f"{ENGINE}MAX_NUM_BATCHED_TOKENS", str(_count(option, value)))


def _scheduling_policy(launch: Launch, option: str, value: str) -> None:
    if value.lower() not in ("priority", "fcfs"):
        raise refuse(option, value, "must be priority or fcfs")


RUNNING_OPTIONS: tuple[ServeOption, ...] = (
    sets(f"{UP}GPU_MEMORY_UTILIZATION", "`--gpu-memory-utilization`", "--gpu-memory-utilization"),
    supported(
        _kv_bytes, "`--kv-cache-gib` of the engine", "test_names_and_lengths", "--kv-cache-memory-bytes"
    ),
    supported(
        _batched_tokens,
        "`--max-num-batched-tokens` of the engine",
        "test_names_and_lengths",
        "--max-num-batched-tokens",
    ),
    sets_engine("max_num_seqs", "--max-num-seqs"),
    sets_engine("max_prefill_batch", "--max-num-prefill-seqs"),
    sets_engine("block_size", "--block-size"),
    sets_engine("enable_prefix_caching", "--enable-prefix-caching", kind=Kind.FLAG),
    sets_engine("max_capture_tokens", "--max-seq-len-to-capture --max-cudagraph-capture-size"),
    sets_engine("enforce_eager", "--enforce-eager", kind=Kind.FLAG),
    sets_engine("async_stepping", "--async-scheduling", kind=Kind.FLAG),
    sets(f"{UP}DEVICE", "`--device`; absent: `auto`, which is hpu, cuda or cpu by what is there", "--device"),
    sets(f"{UP}ENGINES", "`--engines`: the router spreads requests over them", "--data-parallel-size -dp"),
    only("an engine on several cards is not done yet", "--tensor-parallel-size -tp", ("1",)),
    only("an engine on several cards is not done yet", "--pipeline-parallel-size -pp", ("1",)),
    only("an engine on several cards is not done yet", "--decode-context-parallel-size -dcp", ("1",)),
    only("weights stay on the device", "--cpu-offload-gb", ("0",)),
    only("--kv-cache-memory-bytes sizes the cache", "--num-gpu-blocks-override"),
    supported(
        _scheduling_policy,
        "`priority` is always on; sequences of equal priority, as all are that name none, are `fcfs`",
        "test_scheduling_is_by_priority",
        "--scheduling-policy",
    ),
    only("each engine is told its own part: --role, --kv-connector", "--kv-transfer-config"),
    idle(
        "prompts are always computed in chunks, beside decode",
        "--enable-chunked-prefill=true",
        kind=Kind.FLAG,
    ),
    idle(
        "prompts are always computed in chunks, beside decode",
        "--max-num-partial-prefills=1 --max-long-partial-prefills=1 --long-prefill-token-threshold=0",
    ),
    idle(
        "a sequence that loses its blocks is computed again", "--swap-space=0|4 --preemption-mode=recompute"
    ),
    idle("buckets see to padding, whatever is scheduled", "--use-padding-aware-scheduling", kind=Kind.FLAG),
    idle("there is one block manager", "--use-v2-block-manager=true", kind=Kind.FLAG),
    idle(
        "the next step is prepared while the device computes",
        "--num-scheduler-steps=1 --multi-step-stream-outputs=true --num-lookahead-slots=0 "
        "--scheduler-delay-factor=0",
    ),
    idle(
        "the next step is prepared while the device computes", "--disable-async-output-proc", kind=Kind.FLAG
    ),
    idle(
        "an engine has one card and one process for it",
        "--distributed-executor-backend=uni --worker-cls=auto --worker-extension-cls= "
        "--max-parallel-loading-workers --data-parallel-backend=mp",
    ),
    idle(
        "an engine has one card, so it has all experts",
        "--enable-expert-parallel --enable-eplb",
        kind=Kind.FLAG,
    ),
    idle(
        "an engine has one card and one process for it",
        "--ray-workers-use-nsight --enable-dbo",
        kind=Kind.FLAG,
    ),
    idle(
        "an engine has one card: nothing is reduced over several",
        "--disable-custom-all-reduce=false|true",
        kind=Kind.FLAG,
    ),
    idle(
        "blocks that sequences share are read by each",
        "--disable-cascade-attn --kv-sharing-fast-prefill",
        kind=Kind.FLAG,
    ),
    only("an engine is ended to give its memory back", "--enable-sleep-mode", kind=Kind.FLAG),
    only("a stream has a chunk for each step", "--stream-interval", ("1",)),
    only("no plug-in reads it", "--additional-config --scheduler-cls"),
    only("traces are an option of each service, see docs/operations/observing.md", "--otlp-traces-endpoint"),
    idle(
        "buckets decide what is compiled; `--warmup` of the engine, when",
        "--compilation-config -O --cuda-graph-sizes --cudagraph-capture-sizes --num-gpu-blocks",
    ),
    idle("blocks are known by a hash of 128 bits", "--prefix-caching-hash-algo=builtin|sha256"),
)


def _origins(launch: Launch, option: str, value: str) -> None:
    try:
        origins = json.loads(value) if value.startswith("[") else value.split(",")
    except (ValueError, RecursionError):
        raise refuse(option, value, "must be a JSON list of texts") from None
    if not all(isinstance(origin, str) and origin for origin in origins):
        raise refuse(option, value, "must be a JSON list of texts")
    launch.ask(f"{UP}CORS_ALLOW_ORIGINS", ",".join(origins))


def _api_key(launch: Launch, option: str, value: str) -> None:
    if not all(key.strip() for key in value.split(",")):
        raise refuse(option, "", EMPTY_KEY)
    launch.ask(API_KEY, value)


SERVER_OPTIONS: tuple[ServeOption, ...] = (
    sets(f"{UP}HOST", "`--host`; absent: 127.0.0.1, where vLLM takes every address", "--host"),
    sets(f"{UP}PORT", "`--port`", "--port"),
    supported(
        _api_key,
        "`--api-key`; an empty key ends the start",
        "test_an_empty_key_ends_the_start",
        "--api-key",
        kind=Kind.WORDS,
    ),
    sets(f"{UP}SSL_CERTFILE", "`--ssl-certfile`", "--ssl-certfile"),
    sets(f"{UP}SSL_KEYFILE", "`--ssl-keyfile`", "--ssl-keyfile"),
    sets(f"{GATEWAY}SSL_CA_CERTS", "`--ssl-ca-certs` of the gateway", "--ssl-ca-certs"),
    supported(_origins, "`--cors-allow-origins`", "test_lists", "--allowed-origins"),
    sets(
        f"{UP}GATEWAYS",
        "`--gateways`; they listen on ports that follow one another",
        "--api-server-count -asc",
    ),
    idle(
        "a model may call whenever a request brings tools, and reasoning is told apart",
        "--enable-auto-tool-choice --enable-reasoning",
        kind=Kind.FLAG,
    ),
    sets(
        f"{UP}TOOL_PARSER",
        "`--tool-parser`; absent: told by the model's chat template. The names are vLLM's; one that "
        "[the table of formats](api.md#tools) lacks is refused at the start",
        "--tool-call-parser",
    ),
    sets(
        f"{UP}REASONING_PARSER",
        "`--reasoning-parser`; absent: told by the model's chat template. The names are vLLM's; one that "
        "[Reasoning](api.md#reasoning) lacks is refused at the start",
        "--reasoning-parser",
    ),
    sets(
        "CATENARY_TOKENIZER_ALLOW_REQUEST_TEMPLATES",
        "`--allow-request-templates` of the tokenizer",
        "--trust-request-chat-template",
        kind=Kind.FLAG,
    ),
    only(
        "parsers are part of the gateway; NVIDIA's nemotron_json and llama_nemotron_json are among them",
        "--tool-parser-plugin --reasoning-parser-plugin",
    ),
    only("a proxy in front does that", "--root-path", ("", "/")),
    only("no code of others runs in the gateway", "--middleware"),
    only("answers have the role assistant", "--response-role", ("assistant",)),
    only("token ids are asked for by the request", "--return-tokens-as-token-ids", kind=Kind.FLAG),
    only("a message's content is what the template asks for", "--chat-template-content-format", ("auto",)),
    idle(
        "logs never hold prompts or answers",
        "--disable-log-requests --enable-log-requests --disable-log-stats --enable-log-outputs "
        "--disable-uvicorn-access-log",
        kind=Kind.FLAG,
    ),
    idle("logs never hold prompts or answers", "--max-log-len"),
    idle(
        "`--log-level` of `catenary up`, or VLLM_LOGGING_LEVEL", "--uvicorn-log-level=info --log-config-file"
    ),
    idle("the gateway is always a process of its own", "--disable-frontend-multiprocessing", kind=Kind.FLAG),
    idle(
        "the gateway's limits are its options",
        "--max-logprobs=20 --h11-max-incomplete-event-size=4194304 --h11-max-header-count=256",
    ),
    idle("the gateway serves no pages", "--disable-fastapi-docs", kind=Kind.FLAG),
    idle(
        "llguidance does it, or xgrammar with `--grammar-backend` of the engine",
        "--guided-decoding-backend=auto|guidance --structured-outputs-config",
    ),
    only(
        "a schema itself says what may stand between and beside its values",
        "--guided-decoding-disable-any-whitespace --guided-decoding-disable-additional-properties",
        kind=Kind.FLAG,
    ),
    idle("there is one way to follow a grammar", "--guided-decoding-disable-fallback", kind=Kind.FLAG),
)
