"""How much the bucketing strategies pad on chat traffic: learned on one seed, judged on another.

`learned` gets exactly as many graphs as `exponential` has at its defaults. Steps are those of the engine's
own scheduler under a simulated clock, at three loads; see services/engine/learning.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from services.engine.bucketing import STRATEGIES, BucketLimits, build_plan, plan_of
from services.engine.learning import (
    Budget,
    ExactShapes,
    ModelCost,
    Staircase,
    StepTimes,
    Workload,
    assess,
    chat_lengths,
    estimated_times,
    learn_for,
)

# What learning one axis alone takes at the most of its values; the optimum is sought over all of them.
_AXIS_VALUES = 512


def times_of(block_size: int) -> StepTimes:
    """Return a model of 8 billion parameters in bfloat16 on one card of 2.45 TB/s and 432 TFLOPS."""
    cost = ModelCost(
        parameters=8.0e9,
        parameter_bytes=2,
        kv_bytes_per_token=2 * 32 * 8 * 128 * 2,
        attention_width=32 * 32 * 128,
        vocab_size=128_256,
    )
    return estimated_times(
        cost, block_size=block_size, bytes_per_second=2.45e12, flops_per_second=432e12, launch_s=2e-4
    )


def best_boundaries(histogram: Mapping[int, int], count: int) -> list[int]:
    """Return the `count` values that pad this histogram least, by plain dynamic programming over all its
    values."""
    values = sorted(histogram)
    weights = np.array([histogram[value] for value in values], dtype=np.float64)
    sums = np.concatenate([[0.0], weights.cumsum()])
    sizes = np.array(values, dtype=np.float64)
    best = np.full(len(values) + 1, np.inf)
    best[0] = 0.0
    came: list[np.ndarray] = []
    crossed = np.tril(np.ones((len(values), len(values)), dtype=bool), -1)
    for _ in range(min(count, len(values))):
        cost = best[:-1, None] + (sums[None, 1:] - sums[:-1, None]) * sizes[None, :]
        cost[crossed] = np.inf
        came.append(cost.argmin(axis=0))
        best = np.concatenate([[np.inf], cost.min(axis=0)])
    index, found = len(values), []
    for starts in reversed(came):
        found.append(values[index - 1])
        index = int(starts[index - 1])
    return found[::-1]


def learned_boundaries(histogram: Mapping[int, int], count: int, last: int) -> list[int]:
    """Return the values that `learned` gives one axis: its dynamic program over one row, the last value being
    given."""
    values = sorted(histogram)
    step = max(1, len(values) // _AXIS_VALUES)
    kept = sorted({*values[::step], values[-1]})
    weights = np.zeros((1, len(kept)))
    for value, times in histogram.items():
        weights[0, bisect_left(kept, value)] += times
    costs = np.array([kept], dtype=np.float64)
    best = Staircase(
        weights, costs, np.zeros_like(costs), np.full_like(costs, last), most=count - 1, width=count - 1
    )
    return [*(kept[at] for _, at in best.buckets(count - 1)), last]


def padding(histogram: Mapping[int, int], boundaries: Sequence[int]) -> float:
    """Padded minus real over real."""
    real = sum(value * times for value, times in histogram.items())
    used = sum(boundaries[bisect_left(boundaries, value)] * times for value, times in histogram.items())
    return used / real - 1


def queries(workload: Workload) -> Counter[int]:
    """Return how often each longest chunk of a prefill forward occurs."""
    found: Counter[int] = Counter()
    for bucket, times in workload.run(ExactShapes(workload.limits)).shapes(decode=False).items():
        found[bucket.query] += times
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=4000)
    parser.add_argument("--learn-seed", type=int, default=1)
    parser.add_argument("--judge-seed", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-prefill-batch", type=int, default=1)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--kv-blocks", type=int, default=1024)
    parser.add_argument("--padding-price", type=float, default=0.1)
    given = parser.parse_args()
    limits = BucketLimits(
        given.block_size,
        given.max_model_len,
        given.max_num_seqs,
        given.max_num_batched_tokens,
        given.kv_blocks,
        max_prefill_seqs=given.max_prefill_batch,
    )
    times = times_of(given.block_size)
    learning, judging = (
        Workload.of(chat_lengths(seed, given.sequences), limits, times, seed=seed)
        for seed in (given.learn_seed, given.judge_seed)
    )
    plans = {name: build_plan(name, limits) for name in STRATEGIES}
    graphs = len(plans["exponential"].prefill) + len(plans["exponential"].decode)
    plans["learned"] = plan_of(
        learn_for(learning, Budget(graphs=graphs, padding_price=given.padding_price)), limits
    )
    print(f"{limits}")
    print(
        f"{'strategy':<12} {'prefill':>8} {'decode':>7} {'graphs':>7} "
        f"{'rows':>8} {'blocks':>8} {'query':>8} {'step ms':>8}"
    )
    for name, plan in plans.items():
        a = assess(plan, judging)
        print(
            f"{name:<12} {a.prefill_graphs:>8} {a.decode_graphs:>7} {a.graphs:>7} "
            f"{a.decode_row_padding:>8.2%} {a.decode_block_padding:>8.2%} {a.query_padding:>8.2%} "
            f"{a.step_time * 1e3:>8.3f}"
        )
    shown, seen = queries(learning), queries(judging)
    axis = list(plans["exponential"].axes["prefill_query"])
    learned = learned_boundaries(shown, len(axis), limits.max_query)
    optimum = padding(seen, best_boundaries(seen, len(axis)))
    print(f"query axis alone, {len(axis)} values: padding of the judged steps")
    print(f"  exponential {padding(seen, axis):.2%}, learned {padding(seen, learned):.2%}")
    print(f"  optimum for the judged steps themselves, in hindsight {optimum:.2%}")
    print(f"  learned over the optimum {(1 + padding(seen, learned)) / (1 + optimum) - 1:.2%} of the tokens")
    own = padding(shown, best_boundaries(shown, len(axis)))
    print(
        f"  on the steps that it learned from: learned {padding(shown, learned):.2%}, optimum {own:.2%}, "
        f"{(1 + padding(shown, learned)) / (1 + own) - 1:.3%} apart"
    )


if __name__ == "__main__":
    main()
