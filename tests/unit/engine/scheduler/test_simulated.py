"""Random events against the scheduler, over a KV memory that notices wrong, shared and stale slots."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.scheduler import SchedulerConfig
from tests.support.scheduler_simulator import Simulator
from tests.support.simulated_engine import Setup

URGENCIES = (-3, 0, 5)

SETUPS = {
    "roomy": Setup(SchedulerConfig(64, 8, 8, 32, 2), 64, 4),
    "tight": Setup(SchedulerConfig(48, 8, 12, 16, 3), 14, 4, "linear"),
    "one at a time": Setup(SchedulerConfig(40, 1, 3, 8, 1, max_idle_batched_tokens=20), 10, 4),
    "no queue": Setup(SchedulerConfig(40, 4, 0, 4, 4, max_idle_batched_tokens=9), 12, 8),
    "split by blocks": Setup(SchedulerConfig(40, 6, 6, 24, 2), 30, 4, decode_maxima=(6, 13)),
    "split by rows": Setup(SchedulerConfig(40, 6, 6, 24, 2), 30, 4, decode_maxima=(2, 20)),
    "overlapped": Setup(SchedulerConfig(64, 8, 8, 32, 2), 40, 4, overlapped=True),
    "overlapped, tight": Setup(SchedulerConfig(48, 8, 12, 16, 3), 14, 4, overlapped=True),
    "prefixes": Setup(SchedulerConfig(64, 8, 8, 32, 2), 20, 4, prefix_caching=True, priorities=URGENCIES),
    "prefixes, overlapped": Setup(
        SchedulerConfig(64, 8, 8, 32, 2), 18, 4, prefix_caching=True, overlapped=True, priorities=URGENCIES
    ),
    "prefixes, split": Setup(
        SchedulerConfig(48, 8, 8, 48, 3), 12, 4, decode_maxima=(8, 16), prefix_caching=True, overlapped=True
    ),
    "prefixes, alike": Setup(
        SchedulerConfig(36, 12, 8, 36, 4), 12, 4, prefix_caching=True, priorities=URGENCIES, alike=0.5
    ),
    "priorities": Setup(
        SchedulerConfig(48, 6, 12, 24, 2, priority_ageing_steps=12), 20, 4, priorities=URGENCIES
    ),
    "everything": Setup(
        SchedulerConfig(48, 6, 12, 24, 2, priority_ageing_steps=40),
        16,
        4,
        prefix_caching=True,
        overlapped=True,
        priorities=URGENCIES,
    ),
    "more while nothing decodes": Setup(
        SchedulerConfig(64, 2, 8, 8, 2, max_idle_batched_tokens=20),
        30,
        4,
        prefix_caching=True,
        overlapped=True,
    ),
    "beams": Setup(SchedulerConfig(40, 9, 9, 24, 2), 40, 4, beams=0.4, overlapped=True),
    "beams, tight": Setup(
        SchedulerConfig(40, 8, 12, 16, 3), 20, 4, beams=0.3, overlapped=True, priorities=URGENCIES
    ),
    "beams, prefixes, split": Setup(
        SchedulerConfig(40, 8, 8, 24, 2), 24, 4, decode_maxima=(5, 30), prefix_caching=True, beams=0.3
    ),
    "contiguous": Setup(SchedulerConfig(64, 8, 8, 32, 2, contiguous=True, max_block_moves=3), 64, 4),
    "contiguous, overlapped": Setup(
        SchedulerConfig(48, 8, 12, 24, 2, contiguous=True),
        40,
        2,
        overlapped=True,
        priorities=URGENCIES,
    ),
}

EVENTS = (
    "waiting to running",
    "running to finished",
    "waiting to finished",
    "preempted to running",
    "preempted to finished",
    "preempted for blocks",
    "preempted for an urgent one",
    "preempted in flight",
    "ends with a step in flight",
    "waits for a step in flight",
    "tokens in flight",
    "ends by stop",
    "ends by length",
    "ends after preemption",
    "abort in prefill",
    "failed steps",
    "queue full",
    "refused",
    "splits",
    "more blocks than the pool",
    "chunks that do not end a prompt",
    "chunks and decodes",
    "prefill batches",
    "hits of waiting",
    "hits of preempted",
    "all but one block hit",
    "evictions",
    "moves",
    "copies",
    "waits for a prompt",
    "starts as a decode",
    "prompts that outlive their sequences",
    "searches",
    "branches",
    "beams that share their last block",
    "more while nothing decodes",
)


def run_all(events: int, seed: int) -> Counter[str]:
    """Runs every setup for so many events."""
    counts: Counter[str] = Counter()
    for name, setup in SETUPS.items():
        Simulator(setup, random.Random(f"{name} {seed}"), counts).run(events)
    return counts


@pytest.mark.timeout(600)
def test_everything_happens_a_thousand_times_and_the_invariants_hold() -> None:
    counts = run_all(440_000 // len(SETUPS) + 1, seed=1)
    assert {event: counts[event] for event in EVENTS if counts[event] < 1000} == {}
    assert counts["beams that start beside their trunk"] > 50


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [2, 4, 7])
def test_the_invariants_hold_for_millions_of_events(seed: int) -> None:
    run_all(1_000_000 // len(SETUPS), seed)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_invariants_hold_for_any_limits(data: st.DataObject) -> None:
    seqs = data.draw(st.integers(1, 6))
    tokens = data.draw(st.integers(seqs, 40))
    caches, contiguous = data.draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    config = SchedulerConfig(
        max_model_len=data.draw(st.integers(2, 60)),
        max_num_seqs=seqs,
        max_waiting=data.draw(st.integers(0, 6)),
        max_num_batched_tokens=tokens,
        max_prefill_seqs=data.draw(st.integers(1, 4)),
        priority_ageing_steps=data.draw(st.integers(1, 50)),
        contiguous=contiguous,
        max_block_moves=data.draw(st.integers(1, 4)),
        max_idle_batched_tokens=data.draw(st.none() | st.integers(tokens, 60)),
    )
    setup = Setup(
        config,
        blocks=data.draw(st.integers(1, 30)),
        block_size=data.draw(st.integers(1, 20)),
        strategy=data.draw(st.sampled_from(["linear", "exponential"])),
        prefix_caching=caches,
        overlapped=data.draw(st.booleans()),
        priorities=data.draw(st.sampled_from([(0,), (0, 1), URGENCIES])),
        beams=data.draw(st.sampled_from([0.0, 0.3])),
    )
    Simulator(setup, random.Random(data.draw(st.integers(0, 2**32)))).run(120)
