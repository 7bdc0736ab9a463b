"""Our code for the HPU against the traps of the hardware: `make mutants` breaks it so that these fail.

deploy/mutants/mutations.py names for each of its mutations the test here, or elsewhere, that must notice it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from services.engine.device import HIDDEN, Device, DeviceError, ExecutionMode, sim
from services.engine.device.cpu import CpuDevice
from services.engine.device.sim.card import acquire
from services.engine.device.sim.graphs import wrap
from services.engine.model.paged import LayerCache, LayerSpec
from services.engine.sampling.draw import ComparingSearch, Filters, draw_wide, largest

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
        yield lambda mode: sim.open_sim(mode)
    sim.card().release()


def staged(count: int, rows: int = 2) -> torch.Tensor:
    """A view into a staging buffer, as a step's inputs are: at another place in each step."""
    buffer = torch.arange(float(8 * rows)).to("hpu").view(-1, rows)
    return buffer.narrow(0, count, 1)[0]


def test_a_bucket_is_captured_once_whatever_its_inputs_are(opened: Opener) -> None:
    device = opened(ExecutionMode.GRAPH)
    cache = device.memory.zeros((4,), torch.float32)
    runs = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        runs.append(x)
        cache.add_(x.sum())
        return x * 2

    replay = device.execution.capture(forward, [staged(0)])
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
    replay = device.execution.capture(lambda x: x + 1, [first])
    assert replay(torch.full((2,), 5.0).to("hpu")).tolist() == [6.0, 6.0]
    assert first.tolist() == [1.0, 1.0]


def test_buffers_that_a_graph_writes_stay_usable(opened: Opener) -> None:
    device = opened(ExecutionMode.GRAPH)
    cache = device.memory.zeros((4, 2), torch.float32)

    def forward(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, rows, x)
        return cache.index_select(0, rows)

    x, rows = torch.ones(1, 2).to("hpu"), torch.tensor([2]).to("hpu")
    replay = device.execution.capture(forward, [x, rows])
    replay(x, rows)
    assert cache.sum().item() == 2.0


def test_after_a_warm_up_that_only_compiled_the_kv_is_clear(opened: Opener) -> None:
    device = opened(ExecutionMode.COMPILE)
    cache = device.memory.zeros((4, 2), torch.float32)
    with device.execution.warming():
        cache.index_copy_(0, torch.tensor([1]).to("hpu"), torch.ones(1, 2).to("hpu"))
    assert cache.tolist() == [[0.0, 0.0]] * 4


class Tables(nn.Module):
    """Keeps what it computes for a number of tokens, in one of several ways."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.keep = keep
        self.tables: dict[int, torch.Tensor] = {}
        self.plain: torch.Tensor | None = None
        self.buffer: torch.Tensor
        self.nested: list[tuple[torch.Tensor, ...]] = []
        self.register_buffer("buffer", torch.zeros(3).to("hpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.keep:
            case "dict":
                self.tables[x.shape[0]] = x * 2
            case "attribute":
                self.plain = x * 2
            case "nested":
                self.nested.append((self.buffer, x * 2))
            case "buffer":
                self.buffer = x * 2
            case "written":
                self.buffer.copy_(x)
        return x + 1


@pytest.mark.parametrize(
    ("keep", "name"),
    [
        ("dict", "inner.tables.3"),
        ("attribute", "inner.plain"),
        ("nested", "inner.nested.0.1"),
        ("buffer", "inner.buffer"),
        ("written", "inner.buffer"),
        ("nothing", None),
    ],
)
def test_what_a_module_keeps_of_a_warm_up_that_only_compiled_is_refused(
    opened: Opener, keep: str, name: str | None
) -> None:
    device = opened(ExecutionMode.COMPILE)
    x = device.memory.to_device(torch.ones(3))
    with torch.inference_mode(False):
        model = nn.ModuleDict({"inner": Tables(keep)})
    # A cache is such a tensor too, but the device knows it and clears it.
    model.cache = device.memory.zeros((4, 2), torch.float32)
    refused = pytest.raises(
        DeviceError, match=f"the model keeps {name} of the warm-up.*--compile-only-warmup"
    )
    with nullcontext() if name is None else refused, device.execution.warming([model]):
        model["inner"](x)
        model.cache.index_copy_(0, torch.tensor([1]).to("hpu"), torch.ones(1, 2).to("hpu"))
    assert model.cache.cpu().sum() == 0


def test_a_warm_up_that_runs_may_leave_tables(opened: Opener) -> None:
    device = opened(ExecutionMode.EAGER)
    model = Tables("dict")
    with device.execution.warming([model]):
        model(device.memory.to_device(torch.ones(3)))
    assert model.tables[3].tolist() == [2, 2, 2]


def test_every_bucket_is_compiled_beyond_dynamos_own_limit(opened: Opener) -> None:
    device = opened(ExecutionMode.COMPILE)
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        device.execution.expect_shapes(12)
        function = device.execution.compile(lambda x: x * 2 + 1)
        for length in range(1, 13):
            function(torch.ones(length).to("hpu"))
    assert sim.card().counters.backend_compilations == 12


def test_a_lazy_forward_is_a_recipe_of_its_own_whatever_surrounds_it(opened: Opener) -> None:
    device = opened(ExecutionMode.LAZY)
    card = sim.card()
    x = torch.ones(4).to("hpu")

    def surround(before: int, after: int, *forwards: Callable[..., torch.Tensor]) -> None:
        y = x
        for _ in range(before):
            y = y + 1
        for forward in forwards:
            y = device.execution.run_eagerly(forward, [y])
        for _ in range(after):
            y = y - 1
        device.execution.flush()

    # Each part alone.
    surround(0, 0, lambda given: given * 2)
    for count in (1, 2):
        surround(count, 0)
        surround(0, count)
    compiled = card.counters.compilations
    for before, after in ((1, 1), (1, 2), (2, 0), (0, 2)):
        surround(before, after, lambda given: given * 2)
    assert card.counters.compilations == compiled


def test_what_is_sent_to_a_lazy_device_is_no_part_of_an_open_recipe(opened: Opener) -> None:
    device = opened(ExecutionMode.LAZY)
    x = device.memory.to_device(torch.ones(4)) + 1
    device.memory.to_device(torch.ones(4)).view(2, 2).add_(1)
    device.memory.to_device(torch.ones(2))
    assert sim.card().counters.open_uploads == 0
    assert x.tolist() == [2, 2, 2, 2]


def test_sums_of_probabilities_fit_the_integers_of_the_device(opened: Opener) -> None:
    # In lazy mode int64 is int32.
    device = opened(ExecutionMode.LAZY)
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


def test_the_largest_scores_are_found_on_the_device(opened: Opener) -> None:
    device = opened(ExecutionMode.EAGER)
    scores = torch.randn(2, 400)
    values, ids = largest(device.memory.to_device(scores), 3)
    expected = scores.topk(3)
    assert torch.equal(values.cpu(), expected.values)
    assert torch.equal(ids.cpu(), expected.indices)
    assert sim.card().counters.fallbacks == 0


def test_blocks_are_cleared_and_copied_in_a_graph(opened: Opener) -> None:
    device = opened(ExecutionMode.GRAPH)
    cache = LayerCache.allocate(device, LayerSpec(1, 2, 2, None), 12, torch.float32)
    cache.key.copy_(torch.arange(24.0).view(12, 1, 2).to("hpu"))

    def run(
        cleared: torch.Tensor, source: torch.Tensor, target: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        cache.clear_blocks(cleared, 4)
        cache.copy_blocks(source, target, tokens, 4)
        return cleared

    numbers = [torch.tensor([number]).to("hpu") for number in (1, 2, 0, 3)]
    device.execution.capture(run, numbers)(*numbers)
    kept = torch.arange(16.0, 24.0)
    copied = torch.cat((kept[:6], torch.zeros(2)))
    assert torch.equal(cache.key.cpu().flatten(), torch.cat((copied, torch.zeros(8), kept)))


def test_a_decode_can_be_captured_and_equals_the_cpus(opened: Opener) -> None:
    device = opened(ExecutionMode.GRAPH)
    generator = torch.Generator().manual_seed(6)
    query = torch.randn(3, 4, 8, generator=generator)
    caches = torch.randn(2, 20, 2, 8, generator=generator)
    # Two blocks of row 0, one of row 1, padding; row 2 is padding too.
    blocks, rows = torch.tensor([2, 0, 3, 4]), torch.tensor([0, 0, 1, 3])
    bias = torch.zeros(4, 1, 4)
    bias[1, :, 2:] = HIDDEN

    def attend(on: Device, *tensors: torch.Tensor) -> torch.Tensor:
        first, keys, values, ids, owners, biases = tensors
        return on.kernels.attend_decode(first, keys, values, ids, owners, biases, 0.35)

    tensors = (query, *caches, blocks, rows, bias)
    on_card = [tensor.to("hpu") for tensor in tensors]
    replay = device.execution.capture(lambda *given: attend(device, *given), on_card)
    expected = attend(CpuDevice(), *tensors)
    torch.testing.assert_close(replay(*on_card).cpu()[:2], expected[:2])
    assert sim.card().counters.captures == 1


def test_a_mask_and_lengths_are_not_given_to_the_kernel_together(opened: Opener) -> None:
    device = opened(ExecutionMode.EAGER)
    query = torch.randn(1, 2, 4, 8)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    tensors = [value.to("hpu") for value in (query, mask, torch.tensor([3]))]
    out = device.kernels.attend_prefill(
        tensors[0], tensors[0], tensors[0], tensors[1], 0.35, lengths=tensors[2]
    )
    expected = scaled_dot_product_attention(query, query, query, attn_mask=mask, scale=0.35)
    torch.testing.assert_close(out.cpu(), expected)


def test_a_lock_that_somebody_else_made_is_not_written_to(tmp_path: Path) -> None:
    settings = sim.SimSettings(lock_directory=tmp_path, modules=1)
    (tmp_path / "precious").write_text("kept")
    lock = tmp_path / f"catenary-sim-{os.getuid()}-module-0.lock"
    lock.symlink_to(tmp_path / "precious")
    with pytest.raises(RuntimeError, match="Device acquire failed"):
        acquire(settings, {})
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_card_of_another_process_is_named_as_taken(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CATENARY_SIM", f"lock_directory={tmp_path},modules=1")
    taken = acquire(sim.SimSettings(lock_directory=tmp_path, modules=1), {})
    with taken, pytest.raises(DeviceError, match="is taken by another process, and none can be shared"):
        opened(ExecutionMode.EAGER)


@pytest.mark.parametrize("objects", [True, False])
def test_a_replay_hashes_its_inputs_alone(
    objects: bool, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BRG hashes every tensor of a call: not those that live as long as the engine, hundreds of them."""
    if not objects:
        # A bridge that looks at its arguments in another way gets the tensors as a list each time.
        monkeypatch.setattr("services.engine.device.sim.graphs.extract_tensors", lambda value: [])
    device = opened(ExecutionMode.GRAPH)
    caches = [device.memory.zeros((4,), torch.float32) for _ in range(20)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        for cache in caches:
            cache.add_(x.sum())
        return x * 2

    replay = device.execution.capture(forward, [staged(0)])
    hashed: list[torch.Tensor] = []
    view_hash = wrap.view_hash

    def counted(tensor: torch.Tensor) -> Any:
        hashed.append(tensor)
        return view_hash(tensor)

    monkeypatch.setattr(wrap, "view_hash", counted)
    before = sim.card().counters.replays
    for count in range(1, 4):
        replay(staged(count))
    assert sim.card().counters.replays == before + 3
    assert len(hashed) == (3 if objects else 3 * 21)
    # What the graph writes was kept for all of them.
    assert {float(cache[0]) for cache in caches} == {
        float(1 + sum(sum((2 * c, 2 * c + 1)) for c in (1, 2, 3)))
    }
