"""The first token of a long prompt, and many prompts at once, in an engine core of this process.

Run: `python -m benchmarks.first_token`. Each prompt is new and has the engine for itself: milliseconds from
its submit to its token, and those of them that the model's calls take. Then `--streams` sequences at once:
output tokens a second, prompts included. No gateway, router or network is in the figures. Further options are
the engine's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

from benchmarks.memory_link import MemoryLink
from catenary.config import load
from services.engine.config import EngineConfig
from services.engine.core.loop import CoreLoop
from services.engine.core.process import start_engine
from services.engine.domain import SamplingOptions
from services.engine.link import CoreStep, SubmitSequence

CALLS = ("clear_blocks", "prefill", "select", "logits")


class Core:
    """A core in this process. `calls`: what the model's calls took, in seconds."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = cast("Any", start_engine(config, lambda activity, fraction: None))
        self.vocab_size = self.engine.ready.model.vocab_size
        self.link = MemoryLink()
        link: Any = self.link
        self.loop = CoreLoop(link, self.engine)
        self.keys = 0
        self.calls: list[tuple[str, float]] = []
        for name in CALLS:
            call = getattr(self.engine.model, name, None)
            if call is not None:
                setattr(self.engine.model, name, self._timed(name, call))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.calls.append((name, time.perf_counter() - begin))

        return timed

    def submit(self, token_ids: list[int], max_tokens: int) -> None:
        """Give the core a greedy sequence of exactly so many tokens."""
        self.keys += 1
        self.loop.handle(
            SubmitSequence(
                self.keys,
                token_ids,
                prompt_len=len(token_ids),
                sampling=SamplingOptions(temperature=0.0, seed=0),
                max_tokens=max_tokens,
                min_tokens=0,
                stop_token_ids=[],
                ignore_eos=True,
            )
        )

    def advance_to(self, tokens: int) -> float:
        """Return seconds until so many tokens were reported."""
        self.link.sent.clear()
        begin, got = time.perf_counter(), 0
        while got < tokens:
            self.loop.advance()
            got += sum(len(s.columns.token_ids) for s in self.link.sent if isinstance(s, CoreStep))
            self.link.sent.clear()
        seconds = time.perf_counter() - begin
        while self.loop.work.busy:
            self.loop.advance()
        self.link.sent.clear()
        return seconds


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=832, help="of the long prompts")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--streams", type=int, default=32, help="0: none")
    parser.add_argument("--repeats", type=int, default=2, help="runs of the streams")
    parser.add_argument("--seed", type=int, default=1)
    options, engine = parser.parse_known_args()
    core, rng = Core(load(EngineConfig, engine, prog="core")), random.Random(options.seed)

    def prompt(count: int) -> list[int]:
        return [rng.randrange(3, core.vocab_size) for _ in range(count)]

    core.submit(prompt(options.tokens), 1)
    core.advance_to(1)
    times = []
    for _ in range(options.prompts):
        core.calls.clear()
        core.submit(prompt(options.tokens), 1)
        times.append(core.advance_to(1) * 1e3)
        print(f"{times[-1]:7.1f} ms:", *(f"{name} {taken * 1e3:.2f}" for name, taken in core.calls))
    print(
        f"first token of {options.tokens}: median {statistics.median(times):.1f}, least {min(times):.1f} ms"
    )
    for _ in range(options.repeats if options.streams else 0):
        for _ in range(options.streams):
            core.submit(prompt(64), 128)
        seconds = core.advance_to(128 * options.streams)
        print(f"{options.streams} streams: {128 * options.streams / seconds:.1f} tokens/s")


if __name__ == "__main__":
    main()
