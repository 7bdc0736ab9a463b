"""Compares placement policies on a simulated fleet, in virtual time and from one seed.

Run: `python -m benchmarks.fleet_sim --traffic multi-turn --engines 8`. Engines are scripted ones with finite
KV, a prefix cache and a latency model; fleet, index, placement and its accounts are the router's own code.
What is left out is the network, and admission but for its order: who finds no room waits, first come first
served.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence

import catenary.grpc_environment  # noqa: F401
from benchmarks.fleet import TRAFFIC, FleetPlan, FleetRun
from services.router.placement import POLICIES

HEADER = "| policy | requests | TTFT p50 | p90 | p99 | tokens/s | prefix hits | hot spot | placed again |"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def hot_spot(loads: Sequence[Sequence[int]]) -> float:
    """Mean over time of the largest load over the mean load; 1 is even."""
    ratios = [max(one) * len(one) / sum(one) for one in loads if sum(one)]
    return statistics.mean(ratios) if ratios else 1.0


def simulate(plan: FleetPlan, traffic: str, requests: int, rate: float) -> FleetRun:
    """Return one run: the same arrivals for every policy of a seed."""
    arrivals = TRAFFIC[traffic](random.Random(f"{plan.seed} {traffic}"), requests, rate)
    return FleetRun(plan, arrivals).run()


def row(run: FleetRun) -> str:
    """Return a run as a row of the table; times in milliseconds."""
    ended = [one for one in run.outcomes if one.ended is not None and one.first_token is not None]
    waits = [1e3 * (one.first_token - one.arrived) for one in ended if one.first_token is not None]
    again = sum(one.placements - 1 for one in ended)
    hits = 100 * run.cached_tokens / max(1, run.prompt_tokens)
    return (
        f"| {run.plan.policy} | {len(ended)} of {len(run.outcomes)} | {percentile(waits, 0.5):,.0f} "
        f"| {percentile(waits, 0.9):,.0f} | {percentile(waits, 0.99):,.0f} "
        f"| {sum(one.tokens for one in ended) / run.now:,.0f} "
        f"| {hits:.0f} % | {hot_spot(run.loads):.2f} | {again} |"
    )


def main() -> None:
    """Read the options and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traffic", choices=list(TRAFFIC), default="multi-turn")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second of the whole fleet")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=4096, help="KV blocks of an engine, 16 tokens each")
    parser.add_argument("--policy", action="append", choices=sorted(POLICIES))
    parser.add_argument(
        "--fault", type=float, action="append", default=[], help="second at which an engine dies"
    )
    parser.add_argument(
        "--slow-share", type=float, default=0.0, help="share of engines that are 3 times slower"
    )
    parser.add_argument("--no-kv-events", action="store_true", help="engines tell nothing of their caches")
    options = parser.parse_args()
    print(HEADER)
    print("|" + " --- |" * (HEADER.count("|") - 1))
    for policy in options.policy or sorted(POLICIES):
        plan = FleetPlan(
            engines=options.engines,
            policy=policy,
            seed=options.seed,
            blocks=options.blocks,
            publishes_kv=not options.no_kv_events,
            faults=tuple(options.fault),
            slow_share=options.slow_share,
        )
        print(row(simulate(plan, options.traffic, options.requests, options.rate)), flush=True)


if __name__ == "__main__":
    main()
