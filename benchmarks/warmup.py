"""A full warm-up, started twice: with an empty cache of compiled code, and with what the first one left.

python -m benchmarks.warmup --model smollm2 --max-model-len 128

Each start is a process of its own, since a compiler remembers within one what it did. With `--no-compile` the
buckets are only run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.memory_link import MemoryLink
from services.engine.config import EngineConfig
from services.engine.core.loop import CoreLoop
from services.engine.core.process import start_engine
from services.engine.domain import SamplingOptions
from services.engine.graphs import Phase
from services.engine.link import CoreStep, SubmitSequence


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=128)
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--max-num-batched-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="0: one for each core")
    parser.add_argument("--tokens", type=int, default=8, help="greedy tokens of one prompt after the start")
    parser.add_argument("--cache-dir", help="for compiled code; a temporary one by default")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--once", action="store_true", help="make one start and print its figures as JSON")
    return parser.parse_args(arguments)


def start_once(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start a core in this process, answers one prompt and ends the core. Seconds, counts and the tokens."""
    config = EngineConfig(
        model=arguments.model,
        dtype=arguments.dtype,
        warmup="full",
        compile=arguments.compile,
        cache_dir=arguments.cache_dir,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        device_threads=arguments.threads,
        log_level="warning",
    )
    begun = time.monotonic()
    warming: list[float] = []

    def progress(activity: str, fraction: float | None) -> None:
        if activity == "warming up":
            warming.append(time.monotonic())

    engine: Any = start_engine(config, progress)
    ready = time.monotonic()
    tokens = _answer(engine, arguments.tokens)
    answered = time.monotonic()
    figures = {
        "loading_s": warming[0] - begun,
        "warm_up_s": ready - warming[0],
        "answer_s": answered - ready,
        "shapes": engine.device.execution.shapes.first_seen,
        "compilations": engine.device.execution.compilations(),
        "buckets": sum(len(engine.graphs.captured(phase)) for phase in (Phase.PREFILL, Phase.DECODE)),
        "first_seen": engine.graphs.first_seen,
        "tokens": tokens,
    }
    engine.close()
    return figures


def _answer(engine: Any, count: int) -> list[int]:
    link: Any = MemoryLink()
    loop = CoreLoop(link, engine)
    loop.handle(
        SubmitSequence(
            1,
            list(range(3, 15)),
            prompt_len=12,
            sampling=SamplingOptions(temperature=0.0, seed=0),
            max_tokens=count,
            min_tokens=0,
            stop_token_ids=[],
            ignore_eos=True,
        )
    )
    while loop.work.busy:
        loop.advance()
    steps = [message for message in link.sent if isinstance(message, CoreStep)]
    return [token for step in steps for token in step.columns.token_ids]


def _start_in_a_process(arguments: Sequence[str], cache_dir: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.warmup", "--once", *arguments, "--cache-dir", cache_dir]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    return figures


def main() -> None:
    """Print one line of JSON, or a table of two starts."""
    arguments = parse()
    write = sys.stdout.write
    if arguments.once:
        write(json.dumps(start_once(arguments)) + "\n")
        return
    with tempfile.TemporaryDirectory() as temporary:
        cache_dir = arguments.cache_dir or temporary
        starts = {name: _start_in_a_process(sys.argv[1:], cache_dir) for name in ("first", "second")}
    write("| start | shapes | compilations | loading s | warm-up s |\n| --- | --- | --- | --- | --- |\n")
    for name, figures in starts.items():
        write(
            f"| {name} | {figures['shapes']} | {figures['compilations']} | {figures['loading_s']:.1f} "
            f"| {figures['warm_up_s']:.1f} |\n"
        )
    share = starts["second"]["warm_up_s"] / starts["first"]["warm_up_s"]
    same = starts["first"]["tokens"] == starts["second"]["tokens"]
    write(f"\nThe second warm-up takes {share:.0%} of the first; the same tokens: {same}.\n")


if __name__ == "__main__":
    main()
