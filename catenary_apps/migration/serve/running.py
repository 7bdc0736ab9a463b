"""vLLM's options of memory, scheduling, parallelism and execution."""

from __future__ import annotations

from catenary_apps.migration.launch import ENGINE, UP, Launch
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


def _kv_bytes(launch: Launch, option: str, value: str) -> None:
    try:
        launch.ask(f"{ENGINE}KV_CACHE_GIB", f"{count(value) / 2**30:.6f}")
    except ValueError as error:
        raise refuse(option, value, str(error)) from None


def _batched_tokens(launch: Launch, option: str, value: str) -> None:
    try:
        launch.ask(f"{ENGINE}MAX_NUM_BATCHED_TOKENS", str(count(value)))
    except ValueError as error:
        raise refuse(option, value, str(error)) from None


def _scheduling_policy(launch: Launch, option: str, value: str) -> None:
    if value.lower() not in ("priority", "fcfs"):
        raise refuse(option, value, "must be priority or fcfs")


OPTIONS: tuple[ServeOption, ...] = (
    sets(f"{UP}GPU_MEMORY_UTILIZATION", "`--gpu-memory-utilization`", _SETS, "--gpu-memory-utilization"),
    supported(
        _kv_bytes,
        "`--kv-cache-gib` of the engine",
        f"{_TEST}test_names_and_lengths",
        "--kv-cache-memory-bytes",
    ),
    supported(
        _batched_tokens,
        "`--max-num-batched-tokens` of the engine",
        f"{_TEST}test_names_and_lengths",
        "--max-num-batched-tokens",
    ),
    sets_engine("max_num_seqs", _SETS, "--max-num-seqs"),
    sets_engine("max_prefill_batch", _SETS, "--max-num-prefill-seqs"),
    sets_engine("block_size", _SETS, "--block-size"),
    sets_engine("enable_prefix_caching", _SETS, "--enable-prefix-caching", kind=Kind.FLAG),
    sets_engine("max_capture_tokens", _SETS, "--max-seq-len-to-capture", "--max-cudagraph-capture-size"),
    sets_engine("enforce_eager", _SETS, "--enforce-eager", kind=Kind.FLAG),
    sets_engine("async_stepping", _SETS, "--async-scheduling", kind=Kind.FLAG),
    sets(
        f"{UP}DEVICE",
        "`--device`; absent: `auto`, which is hpu, cuda or cpu by what is there",
        _SETS,
        "--device",
    ),
    sets(
        f"{UP}ENGINES",
        "`--engines`: the router spreads requests over them",
        _SETS,
        "--data-parallel-size",
        "-dp",
    ),
    only("an engine on several cards is not done yet", ("1",), "--tensor-parallel-size", "-tp"),
    only("an engine on several cards is not done yet", ("1",), "--pipeline-parallel-size", "-pp"),
    only("an engine on several cards is not done yet", ("1",), "--decode-context-parallel-size", "-dcp"),
    only("weights stay on the device", ("0",), "--cpu-offload-gb"),
    only("--kv-cache-memory-bytes sizes the cache", (), "--num-gpu-blocks-override"),
    supported(
        _scheduling_policy,
        "`priority` is always on; sequences of equal priority, as all are that name none, are `fcfs`",
        f"{_TEST}test_scheduling_is_by_priority",
        "--scheduling-policy",
    ),
    only("each engine is told its own part: --role, --kv-connector", (), "--kv-transfer-config"),
    idle(
        "prompts are always computed in chunks, beside decode",
        "--enable-chunked-prefill",
        kind=Kind.FLAG,
        nothing=("true",),
    ),
    idle(
        "prompts are always computed in chunks, beside decode",
        "--max-num-partial-prefills",
        "--max-long-partial-prefills",
        "--long-prefill-token-threshold",
        nothing={
            "--max-num-partial-prefills": ("1",),
            "--max-long-partial-prefills": ("1",),
            "--long-prefill-token-threshold": ("0",),
        },
    ),
    idle(
        "a sequence that loses its blocks is computed again",
        "--swap-space",
        "--preemption-mode",
        nothing={"--swap-space": ("0", "4"), "--preemption-mode": ("recompute",)},
    ),
    idle("buckets see to padding, whatever is scheduled", "--use-padding-aware-scheduling", kind=Kind.FLAG),
    idle("there is one block manager", "--use-v2-block-manager", kind=Kind.FLAG, nothing=("true",)),
    idle(
        "the next step is prepared while the device computes",
        "--num-scheduler-steps",
        "--multi-step-stream-outputs",
        "--num-lookahead-slots",
        "--scheduler-delay-factor",
        nothing={
            "--num-scheduler-steps": ("1",),
            "--multi-step-stream-outputs": ("true",),
            "--num-lookahead-slots": ("0",),
            "--scheduler-delay-factor": ("0",),
        },
    ),
    idle(
        "the next step is prepared while the device computes",
        "--disable-async-output-proc",
        kind=Kind.FLAG,
    ),
    idle(
        "an engine has one card and one process for it",
        "--distributed-executor-backend",
        "--worker-cls",
        "--worker-extension-cls",
        "--max-parallel-loading-workers",
        "--data-parallel-backend",
        nothing={
            "--distributed-executor-backend": ("uni",),
            "--worker-cls": ("auto",),
            "--worker-extension-cls": ("",),
            "--data-parallel-backend": ("mp",),
        },
    ),
    idle(
        "an engine has one card, so it has all experts",
        "--enable-expert-parallel",
        "--enable-eplb",
        kind=Kind.FLAG,
    ),
    idle(
        "an engine has one card and one process for it",
        "--ray-workers-use-nsight",
        "--enable-dbo",
        kind=Kind.FLAG,
    ),
    idle(
        "an engine has one card: nothing is reduced over several",
        "--disable-custom-all-reduce",
        kind=Kind.FLAG,
        nothing=("false", "true"),
    ),
    idle(
        "blocks that sequences share are read by each",
        "--disable-cascade-attn",
        "--kv-sharing-fast-prefill",
        kind=Kind.FLAG,
    ),
    only("an engine is ended to give its memory back", ("false",), "--enable-sleep-mode", kind=Kind.FLAG),
    only("a stream has a chunk for each step", ("1",), "--stream-interval"),
    only("no plug-in reads it", (), "--additional-config", "--scheduler-cls"),
    only(
        "traces are an option of each service, see docs/operations/observing.md", (), "--otlp-traces-endpoint"
    ),
    idle(
        "buckets decide what is compiled; `--warmup` of the engine, when",
        "--compilation-config",
        "-O",
        "--cuda-graph-sizes",
        "--cudagraph-capture-sizes",
        "--num-gpu-blocks",
    ),
    idle(
        "blocks are known by a hash of 128 bits",
        "--prefix-caching-hash-algo",
        nothing=("builtin", "sha256"),
    ),
)
