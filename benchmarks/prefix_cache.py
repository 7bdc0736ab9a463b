"""Time to first token of prompts that begin alike, with and without a hit in the prefix cache.

python -m benchmarks.prefix_cache

An engine core runs in this process, with the demo model. Gateway, router and network are not in the figures.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.memory_link import MemoryLink
from catenary.config import load
from services.engine.config import EngineConfig
from services.engine.core.loop import CoreLoop
from services.engine.core.process import start_engine
from services.engine.domain import SamplingOptions
from services.engine.link import CoreStep, SubmitSequence


class Core:
    """A core in this process, one sequence at a time."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine: Any = start_engine(config, lambda activity, fraction: None)
        self.link = MemoryLink()
        link: Any = self.link
        self.loop = CoreLoop(link, self.engine)
        self.keys = 0

    def first_token(self, token_ids: list[int], salt: str) -> tuple[float, int, list[int]]:
        """Return seconds to the first token, cached tokens of the prompt, and the answer's four tokens."""
        self.keys += 1
        self.link.sent.clear()
        submit = SubmitSequence(
            self.keys,
            token_ids,
            prompt_len=len(token_ids),
            sampling=SamplingOptions(temperature=0.0, seed=0),
            max_tokens=4,
            min_tokens=0,
            stop_token_ids=[],
            ignore_eos=True,
            cache_salt=salt,
        )
        begin = time.perf_counter()
        self.loop.handle(submit)
        while not self.tokens():
            self.loop.advance()
        seconds = time.perf_counter() - begin
        while self.loop.work.busy:
            self.loop.advance()
        steps = [step for step in self.link.sent if isinstance(step, CoreStep)]
        return seconds, steps[-1].columns.ends[0].cached_tokens, self.tokens()

    def tokens(self) -> list[int]:
        """Return tokens reported since the last submit."""
        return [token for step in self.link.sent for token in step.columns.token_ids]


def table(rows: Sequence[tuple[str, list[float], int]]) -> str:
    """Median and spread of each row, in milliseconds."""
    lines = [f"{'prompt':<28}{'cached tokens':>14}{'median ms':>11}{'least ms':>10}{'most ms':>10}"]
    for name, seconds, cached in rows:
        times = [second * 1e3 for second in seconds]
        figures = (statistics.median(times), min(times), max(times))
        lines.append(f"{name:<28}{cached:>14}{figures[0]:>11.1f}{figures[1]:>10.1f}{figures[2]:>10.1f}")
    return "\n".join(lines)


def main() -> int:
    """Print the table; 1 if an answer on a hit differs from the one without."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prefix", type=int, default=1024, help="tokens that the prompts share")
    parser.add_argument("--rest", type=int, default=32, help="tokens of each prompt after them")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    config = load(EngineConfig, ["--model", args.model, "--max-model-len", "2048"], prog="core")
    core, rng = Core(config), random.Random(args.seed)
    vocabulary = core.engine.ready.model.vocab_size

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, vocabulary) for _ in range(count)]

    shared = tokens(args.prefix)
    core.first_token(shared + tokens(args.rest), "shared")
    cold: list[float] = []
    warm: list[float] = []
    cached = differing = 0
    for turn in range(args.repeats):
        prompt = shared + tokens(args.rest)
        seconds, cached, answer = core.first_token(prompt, "shared")
        warm.append(seconds)
        # Nobody else's blocks are hit under a salt of one's own.
        seconds, none, again = core.first_token(prompt, f"alone {turn}")
        if none:
            raise SystemExit("a prompt under a new salt hit the cache")
        cold.append(seconds)
        differing += answer != again
    print(f"{args.model}, {args.prefix} shared tokens and {args.rest} others, {args.repeats} times each\n")
    print(table([("without a hit", cold, 0), ("with a hit", warm, cached)]))
    print(
        f"\ntime to first token: {statistics.median(cold) / statistics.median(warm):.1f} times lower on a hit"
    )
    print(f"answers that differ: {differing} of {args.repeats}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
