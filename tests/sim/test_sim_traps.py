"""Our code for the HPU against the traps of the hardware: `make mutants` breaks it so that these fail.

deploy/mutants/mutations.py names for each of its mutations the test here, or elsewhere, that must notice it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from services.engine.device import Device, ExecutionMode, open_device, sim
from services.engine.sampling.inputs import Filters
from services.engine.sampling.search import ComparingSearch
from services.engine.sampling.wide import draw_wide

Opener = Callable[[ExecutionMode], Device]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    """Opens the HPU device on a new card, as a process does that starts in this mode."""
    for name in ("PT_HPU_LAZY_MODE", "HLS_MODULE_ID", "HABANA_VISIBLE_MODULES"):
        # Once set and then deleted, so that what the device sets is undone after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("CATENARY_SIM", f"lock_directory={tmp_path}")
    torch._dynamo.reset()
    with torch.inference_mode():
        yield lambda mode: open_device("sim", mode=mode)
    sim.card().release()


def staged(count: int, rows: int = 2) -> torch.Tensor:
    """A view into a staging buffer, as a step's inputs are: at another place in each step."""
    buffer = torch.arange(float(8 * rows)).to("hpu").view(-1, rows)
    return buffer.narrow(0, count, 1)[0]


def test_a_bucket_is_captured_once_whatever_its_inputs_are(opened: Opener) -> None:
    device = opened(ExecutionMode.GRAPH)
    cache = device.zeros((4,), torch.float32)
    runs = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        runs.append(x)
        cache.add_(x.sum())
        return x * 2

    replay = device.capture(forward, [staged(0)])
    before = sim.card().counters.replays
    for count in range(1, 5):
        assert replay(staged(count)).tolist() == [4.0 * count, 4.0 * count + 2]
    assert len(runs) == 1
    assert sim.card().counters.replays - before == 4
    assert sim.card().counters.captures == 1
    assert cache.tolist() == [sum(4.0 * count + 1 for count in range(5))] * 4


def test_a_replay_leaves_its_callers_tensors_alone(opened: Opener) -> None:
    device = opened(ExecutionMode.GRAPH)
    first = torch.ones(2).to("hpu")
    replay = device.capture(lambda x: x + 1, [first])
    assert replay(torch.full((2,), 5.0).to("hpu")).tolist() == [6.0, 6.0]
    assert first.tolist() == [1.0, 1.0]


def test_buffers_that_a_graph_writes_stay_usable(opened: Opener) -> None:
    device = opened(ExecutionMode.GRAPH)
    cache = device.zeros((4, 2), torch.float32)

    def forward(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, rows, x)
        return cache.index_select(0, rows)

    x, rows = torch.ones(1, 2).to("hpu"), torch.tensor([2]).to("hpu")
    replay = device.capture(forward, [x, rows])
    replay(x, rows)
    assert cache.sum().item() == 2.0


def test_after_a_warm_up_that_only_compiled_the_kv_is_clear(opened: Opener) -> None:
    device = opened(ExecutionMode.COMPILE)
    cache = device.zeros((4, 2), torch.float32)
    with device.warming():
        cache.index_copy_(0, torch.tensor([1]).to("hpu"), torch.ones(1, 2).to("hpu"))
    assert cache.tolist() == [[0.0, 0.0]] * 4


def test_every_bucket_is_compiled_beyond_dynamos_own_limit(opened: Opener) -> None:
    device = opened(ExecutionMode.COMPILE)
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        device.expect_shapes(12)
        function = device.compile(lambda x: x * 2 + 1)
        for length in range(1, 13):
            function(torch.ones(length).to("hpu"))
    assert sim.card().counters.backend_compilations == 12


def test_sums_of_probabilities_fit_the_integers_of_the_device(opened: Opener) -> None:
    device = opened(ExecutionMode.EAGER)
    rows, vocabulary = 6, 300
    generator = torch.Generator().manual_seed(4)
    scaled = torch.randn(rows, vocabulary, generator=generator) * 2
    scaled -= scaled.amax(-1, keepdim=True)
    uniform = torch.rand(rows, generator=generator)
    top_p = torch.linspace(0.3, 0.95, rows)

    def draw(place: torch.device) -> torch.Tensor:
        zeros = torch.zeros(rows, dtype=torch.int64)
        values = (zeros, zeros == 1, top_p, torch.zeros(rows), scaled, uniform)
        top_k, exact, share, least, scores, number = (value.to(place) for value in values)
        filters = Filters(top_k, exact, share, least, any_top_k=False, any_exact=False, any_top_p=True)
        return draw_wide(scores, filters, number, torch.float32, ComparingSearch()).cpu()

    assert torch.equal(draw(device.torch_device), draw(torch.device("cpu")))
