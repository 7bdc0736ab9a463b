"""Families on the simulated HPU give the CPU's logits, without a host read in a forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.device import sim
from services.engine.device.cpu import CpuDevice
from services.engine.model.open_model import open_model
from services.engine.model.paged import PagedModel
from tests.sim.conftest import NewCard
from tests.support import decoder_models, torch_families
from tests.support.hpu_devices import open_choice

BLOCK, BLOCKS = 8, 5
PADDING = BLOCK * BLOCKS
TOKENS = list(range(3, 36))
# Experts of each kind: plain, shared beside routed, with biases and interleaved, fused by hand. And a learned
# position.
TRANSFORMERS = ("deepseek_v3", "glm4_moe", "gpt_oss", "dbrx", "gpt2")


def _logits(model: PagedModel) -> list[torch.Tensor]:
    """Of a prompt in two padded chunks and one decode beside a padded row."""
    model.allocate_kv(BLOCKS, BLOCK)

    def put(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(model.device.torch_device)

    def chunk(first: int, last: int, padding: int, context: list[int]) -> torch.Tensor:
        places = list(range(first, last))
        hidden = model.prefill(
            put(TOKENS[first:last] + [0] * padding),
            put(places + [0] * padding),
            put(places + [PADDING] * padding),
            put([context]).view(1, len(context)),
            put([first]),
        )
        return model.logits(hidden[: last - first])

    parts = [chunk(0, 20, 4, []), chunk(20, 32, 4, [0, 1, 2])]
    owned = [0, 1, 2, 3, 4]
    hidden = model.decode(
        put([TOKENS[32], 0]),
        put([32, 0]),
        put([32, PADDING]),
        put([*owned, BLOCKS]),
        put([0] * len(owned) + [2]),
        put([BLOCK * index for index in owned] + [0]),
    )
    parts.append(model.logits(hidden[:1]))
    return parts


def _check(directory: Path, backend: str, choice: str) -> None:
    models = [
        open_model(directory, device, dtype="float32", max_model_len=256, backend=backend)
        for device in (CpuDevice(1), open_choice(choice))
    ]
    expected = _logits(models[0])
    before = sim.card().counters.host_reads
    found = _logits(models[1])
    assert sim.card().counters.host_reads == before
    assert models[1].device.execution.counters()["cpu_fallbacks"] == 0
    for there, here in zip(found, expected, strict=True):
        torch.testing.assert_close(there.cpu(), here, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        *((name, "default") for name in decoder_models.FAMILIES),
        *((name, "plain") for name in ("llama", "mixtral", "gemma3_text")),
    ],
)
def test_our_decoder(new_card: NewCard, tmp_path: Path, name: str, choice: str) -> None:
    new_card()
    _check(decoder_models.save_family(name, tmp_path), "decoder", choice)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_modules(new_card: NewCard, tmp_path: Path, name: str) -> None:
    new_card()
    directory = torch_families.save_family(torch_families.FAMILIES[name], tmp_path)
    _check(directory, "transformers", "default")
