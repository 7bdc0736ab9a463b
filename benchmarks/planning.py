"""What the scheduler costs: planning and committing steps with many running and waiting sequences.

Run: `python -m benchmarks.planning`. It uses no device: a step is planned while the one before it is in
flight, as the core does, and its tokens are made up. Times are CPU time of the one thread that there is, so
that neighbours on the machine do not count.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from dataclasses import dataclass

from services.engine.bucketing import BucketLimits, build_plan
from services.engine.kv import BlockPool
from services.engine.scheduler import Scheduler, SchedulerConfig, Sequence, SequenceParams, StepPlan


@dataclass(frozen=True)
class Scene:
    """A load. `blocks` is the pool's share of what all that run would hold at their longest."""

    name: str
    running: int
    waiting: int
    prompt: tuple[int, int] = (16, 512)
    output: tuple[int, int] = (256, 1024)
    blocks: float = 1.0
    prefix_caching: bool = True
    contiguous: bool = False
    priorities: tuple[int, ...] = (0,)


_TOKENS = range(32_000)

SCENES = (
    Scene("all decode", 256, 0),
    Scene("all decode, many wait", 1024, 10_000),
    Scene("short outputs: many end, many start", 1024, 10_000, output=(4, 32)),
    Scene("the pool is short: preemptions", 1024, 10_000, blocks=0.3),
    Scene("the pool is short, priorities 0 to 9", 1024, 10_000, blocks=0.3, priorities=tuple(range(10))),
    Scene("long prompts wait for room", 1024, 10_000, prompt=(2048, 3072), blocks=0.3),
    Scene("contiguous", 1024, 10_000, output=(16, 512), prefix_caching=False, contiguous=True),
)


class Load:
    """Keeps a scheduler at a scene's numbers of running and waiting sequences."""

    def __init__(self, scene: Scene, block_size: int, seed: int) -> None:
        self._scene = scene
        self._rng = random.Random(seed)
        self._keys = 0
        length, seqs, tokens = 4096, scene.running, 8192
        longest = min(length, scene.prompt[1] + scene.output[1])
        blocks = int(seqs * scene.blocks * -(-longest // block_size))
        self._pool = BlockPool(blocks, block_size, prefix_caching=scene.prefix_caching)
        limits = BucketLimits(block_size, length, seqs, tokens, blocks, 16, scene.contiguous)
        config = SchedulerConfig(length, seqs, scene.waiting, tokens, 16, contiguous=scene.contiguous)
        self._scheduler = Scheduler(config, self._pool, build_plan("exponential", limits))
        self._earlier: StepPlan | None = None
        self.plans: list[float] = []
        self.commits: list[float] = []
        self.preempted = self.moved = 0

    def fill(self, warm_up: int) -> None:
        """Add sequences until the scene is full, and run it until ends and starts have mixed."""
        self._refill()
        for _ in range(warm_up):
            self.step()
        for times in (self.plans, self.commits):
            times.clear()
        self.preempted = self.moved = 0

    def step(self) -> None:
        """Plan a step and commit the one before it."""
        start = time.thread_time()
        plan = self._scheduler.plan()
        self.plans.append(time.thread_time() - start)
        if plan is not None:
            self.preempted += len(plan.preempted)
            self.moved += len(plan.moves)
        earlier, self._earlier = self._earlier, plan
        if earlier is not None:
            sampled = {sequence.key: self._rng.choice(_TOKENS) for sequence in earlier.sampling()}
            start = time.thread_time()
            self._scheduler.commit(earlier, sampled)
            self.commits.append(time.thread_time() - start)
        self._refill()

    def running(self) -> int:
        """Return sequences that run."""
        return self._scheduler.load().running

    def _refill(self) -> None:
        load = self._scheduler.load()
        for _ in range(self._scene.running + self._scene.waiting - load.running - load.waiting):
            rng, self._keys = self._rng, self._keys + 1
            prompt = rng.choices(_TOKENS, k=rng.randint(*self._scene.prompt))
            wanted = SequenceParams(
                max_tokens=rng.randint(*self._scene.output),
                min_tokens=2,
                stop_ids=frozenset({32_000}),
                priority=rng.choice(self._scene.priorities),
            )
            self._scheduler.add(Sequence(self._keys, prompt, len(prompt), wanted))


def spread(times: list[float]) -> str:
    """Median, 99th percentile and maximum in milliseconds."""
    ordered = sorted(times)
    values = (statistics.median(ordered), ordered[int(len(ordered) * 0.99)], ordered[-1])
    return "".join(f"{value * 1e3:9.3f}" for value in values)


def main() -> None:
    """Run the scenes and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--block-size", type=int, default=32, help="tokens of a block")
    parser.add_argument("--steps", type=int, default=500, help="steps that are measured")
    parser.add_argument("--warm-up", type=int, default=1500, help="steps before those")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scene", default="", help="only scenes with this in their names")
    options = parser.parse_args()
    head = "".join(f"{text:>9}" for text in ("median", "p99", "worst"))
    print(f"{'milliseconds':<38}{'run':>6}{'wait':>7} | plan{head} | commit{head} | preempted, moved a step")
    for scene in SCENES:
        if options.scene not in scene.name:
            continue
        load = Load(scene, options.block_size, options.seed)
        load.fill(options.warm_up)
        # As the core does once it has started: what lives for long is not visited again.
        gc.collect()
        gc.freeze()
        running = 0
        for _ in range(options.steps):
            load.step()
            running += load.running()
        gc.unfreeze()
        print(
            f"{scene.name:<38}{running // options.steps:>6}{scene.waiting:>7} |     {spread(load.plans)} |"
            f"       {spread(load.commits)} | {load.preempted / options.steps:.2f}, "
            f"{load.moved / options.steps:.2f}"
        )


if __name__ == "__main__":
    main()
