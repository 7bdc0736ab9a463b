"""A forward of our decoder on the simulated card gives the CPU's float32 bits, however it is executed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from services.engine.device import Memory
from services.engine.device.cpu import CpuDevice, CpuSettings, KernelChoice
from services.engine.device.cpu.device import CpuMemory
from services.engine.model.open_model import open_model
from services.engine.model.paged import PagedModel
from tests.sim.conftest import NewCard
from tests.support.torch_engine import save_tiny_model

BLOCK, BLOCKS, WIDTH = 8, 4, 12
Forward = Callable[..., torch.Tensor]
TORCH = CpuSettings(KernelChoice.TORCH)


class OnCard(CpuDevice):
    """The CPU's way of computing, on tensors of the simulated card."""

    def __init__(self) -> None:
        super().__init__(1, settings=TORCH)
        # Not before the simulator is installed: torch has a device of that name without it, too.
        self.memory = CardMemory(torch.device("hpu"))


class CardMemory(CpuMemory):
    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return Memory.zeros(self, shape, dtype)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"))


def opened(directory: Path, device: CpuDevice) -> PagedModel:
    model = open_model(directory, device, dtype="float32", max_model_len=64)
    model.allocate_kv(BLOCKS, BLOCK)
    return model


def logits(model: PagedModel, prefill: Forward, decode: Forward, head: Forward) -> list[torch.Tensor]:
    """Of two rows: a prefill each, of different lengths in one shape, then a decode of both."""

    def put(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(model.device.torch_device)

    parts, padding = [], BLOCK * BLOCKS
    for row, length in enumerate((WIDTH, 9)):
        free, first = WIDTH - length, row * 2 * BLOCK
        tokens = [7 + row, *range(10, 9 + length)] + [0] * free
        places = [*range(length)] + [0] * free
        slots = [*range(first, first + length)] + [padding] * free
        hidden = prefill(put(tokens), put(places), put(slots), put([[]]).view(1, 0), put([0]))
        parts.append(head(hidden[:length]).cpu())
    blocks, owners, starts = [0, 1, 2, 3], [0, 0, 1, 1], [0, BLOCK, 0, BLOCK]
    inputs = map(put, ([5, 6], [WIDTH, 9], [WIDTH, 2 * BLOCK + 9], blocks, owners, starts))
    parts.append(head(decode(*inputs)).cpu())
    return parts


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[torch.Tensor]:
    # The fused attention of a CPU adds in another order than the plain one that other devices get.
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH):
        model = opened(directory, CpuDevice(1, settings=TORCH))
        return logits(model, model.prefill, model.decode, model.logits)


def flushed(forward: Forward) -> Forward:
    import habana_frameworks.torch.core as htcore

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        htcore.mark_step()
        result = forward(*tensors)
        htcore.mark_step()
        return result

    return run


def graphed(forward: Forward) -> Forward:
    import habana_frameworks.torch as htorch

    wrapped: Forward = htorch.hpu.wrap_in_hpu_graph_func(forward)
    return lambda *tensors: wrapped(*tensors).clone()


def compiled(forward: Forward) -> Forward:
    result: Forward = torch.compile(forward, backend="hpu_backend", dynamic=False)
    return result


@pytest.mark.parametrize(
    ("run", "lazy", "counter"),
    [
        (lambda forward: forward, False, "compilations"),
        (flushed, True, "mark_steps"),
        (graphed, True, "captures"),
        (compiled, False, "backend_compilations"),
    ],
    ids=["eager", "lazy", "graph", "compile"],
)
def test_forwards_equal_the_cpus_bit_for_bit(
    new_card: NewCard,
    directory: Path,
    expected: list[torch.Tensor],
    run: Callable[[Forward], Forward],
    lazy: bool,
    counter: str,
) -> None:
    card = new_card(lazy=lazy)
    torch._dynamo.reset()
    with torch.inference_mode():
        model = opened(directory, OnCard())
        forwards = [run(forward) for forward in (model.prefill, model.decode, model.logits)]
        # In lazy mode what lies between two forwards settles with the second turn.
        for turn in range(3):
            before = card.counters.compilations
            for found, wanted in zip(logits(model, *forwards), expected, strict=True):
                assert torch.equal(found, wanted)
            assert turn < 2 or card.counters.compilations == before, "every shape was there before"
        assert getattr(card.counters, counter) > 0
    assert not card.counters.fallbacks
