"""Sampling in static shapes on the simulated HPU: nothing is compiled once all shapes were visited."""

from __future__ import annotations

import random

import pytest

from services.engine.device import ExecutionMode
from services.engine.device.hpu import GAUDI3, HpuDevice, HpuSettings
from services.engine.device.hpu.bridge import load_bridge
from services.engine.device.hpu.fused import parse_switches, probe_kernels
from tests.sim.conftest import NewCard
from tests.support.sampling import run, without_float64
from tests.support.sampling_rows import LAST_TOKENS, VOCAB, random_logits, random_row
from tests.support.static_sampling import StaticSampler


def open_mode(mode: ExecutionMode) -> HpuDevice:
    bridge = load_bridge(mode)
    kernels = probe_kernels(GAUDI3, bridge.version, parse_switches(""))
    return HpuDevice(bridge, GAUDI3, mode, HpuSettings(), kernels)


@pytest.mark.parametrize("mode", ExecutionMode)
def test_after_all_shapes_were_visited_nothing_is_compiled(
    mode: ExecutionMode, new_card: NewCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = mode in (ExecutionMode.LAZY, ExecutionMode.GRAPH)
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1" if lazy else "0")
    new_card(lazy=lazy)
    device = open_mode(mode)
    fresh = device.execution.counters()
    # A compiler takes its time for each shape.
    count = 1 if mode is ExecutionMode.COMPILE else 4
    sampler = StaticSampler(count, VOCAB, device)
    rng = random.Random(3)
    sampler.visit()
    # The test itself moves logits to the device, in a shape of its own.
    sampler.run(random_logits(rng, 1), [random_row(rng)], LAST_TOKENS)
    sampler.graphs.serve()
    before = device.execution.counters()
    for _ in range(12):
        rows = [random_row(rng) for _ in range(rng.randint(1, count))]
        logits = random_logits(rng, count)
        found = sampler.run(logits, rows, LAST_TOKENS)
        expected = run(logits, rows, last_tokens=LAST_TOKENS, device=without_float64())
        assert [one.token_id for one in found] == [one.token_id for one in expected]
        assert found == expected
    after = device.execution.counters()
    for name in ("graph_compilations", "backend_compilations", "captures", "cpu_fallbacks"):
        assert after.get(name) == before.get(name)
    assert sampler.graphs.first_seen == 0
    assert after["cpu_fallbacks"] == 0
    shapes = sum(len(counts) for counts in sampler.program.counts.values())
    if mode.captures:
        # Each is one graph, without breaks.
        name = "captures" if mode is ExecutionMode.GRAPH else "backend_compilations"
        assert after[name] - fresh[name] == shapes
