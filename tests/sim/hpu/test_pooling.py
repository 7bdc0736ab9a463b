"""Pooled engines on the simulated HPU: the CPU's numbers, and no shape that warm-up has not met."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.device import ExecutionMode, sim
from services.engine.model import Task
from tests.support.encoders import save_cross_encoder, save_encoder
from tests.support.pooled_core import LocalPooledCore
from tests.support.sim_device import EAGER, Host
from tests.support.torch_engine import save_tiny_model

LENGTHS = (3, 90, 17, 64, 9, 33, 5, 4)


def documents() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 128) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("encoder", ExecutionMode.LAZY),
        ("encoder", ExecutionMode.GRAPH),
        ("cross-encoder", ExecutionMode.EAGER),
        ("decoder", ExecutionMode.COMPILE),
    ],
)
def test_numbers_equal_the_cpus(
    kind: str, mode: ExecutionMode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"max_model_len": 96, "max_num_batched_tokens": 128}
    task = Task.SCORE if kind == "cross-encoder" else Task.EMBED
    if kind == "encoder":
        save_encoder("bert", tmp_path)
    elif kind == "decoder":
        save_tiny_model("llama", tmp_path)
    else:
        save_cross_encoder("bert", tmp_path)
    seconds = [len(ids) // 2 if task is Task.SCORE else 0 for ids in documents()]
    expected = LocalPooledCore(tmp_path, task, **options).vectors(documents(), second_start=seconds)
    Host(monkeypatch, tmp_path).prepare(mode)
    core = LocalPooledCore(tmp_path, task, device="sim", enforce_eager=mode in EAGER, **options)
    counters = sim.card().counters
    before = (counters.compilations, counters.fallbacks)
    found = core.vectors(documents(), second_start=seconds)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-4, rtol=0)
    assert (counters.compilations, counters.fallbacks) == before
    core.engine.close()
