"""KV that decode fetches as one slice, kept dense by moving blocks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.config import EngineConfig
from services.engine.device import CpuDevice
from services.engine.link import AbortSequences
from services.engine.model.paged import PagedModel
from tests.support.torch_engine import VOCAB, LocalCore, save_tiny_model, tiny_options


@pytest.fixture(scope="module", params=["llama", "mistral"])
def directory(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


def test_answers_equal_those_of_fetching_by_id_while_blocks_move(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    listed: list[int] = []
    copy, attend = PagedModel.copy_blocks, CpuDevice.attend_decode

    def spy(model: PagedModel, sources: torch.Tensor, targets: torch.Tensor) -> None:
        moved.append(int((sources != targets).sum()))
        copy(model, sources, targets)

    def spy_on_blocks(device: CpuDevice, *args: Any) -> torch.Tensor:
        listed.append(args[3].shape[0])
        return attend(device, *args)

    monkeypatch.setattr(PagedModel, "copy_blocks", spy)
    monkeypatch.setattr(CpuDevice, "attend_decode", spy_on_blocks)
    plain = LocalCore(tiny_options(directory, enable_prefix_caching=False))
    dense = LocalCore(tiny_options(directory, enable_prefix_caching=False, contiguous_kv=True, warmup="full"))
    moved.clear()
    rng = random.Random(4)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 70))] for _ in range(24)]
    lengths = [rng.randint(1, 40) for _ in prompts]
    keys = []
    for core in (plain, dense):
        listed.clear()
        keys = [core.submit(p, max_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
        gone = set(keys[::5])
        for step in range(30):
            core.step()
            # The oldest leave holes at the start of the cache.
            if step % 6 == 5 and gone:
                core.loop.handle(AbortSequences([gone.pop()]))
        core.run()
        core.engine.scheduler.check()
    assert sum(moved) > 10
    # All decodes took a slice, and what moved blocks was warmed up too.
    assert set(listed) == {0}
    assert dense.engine.graphs.first_seen == 0
    for key in keys[1::5]:
        assert dense.outputs[key].token_ids == plain.outputs[key].token_ids


def test_contiguous_kv_excludes_prefix_caching() -> None:
    with pytest.raises(ValueError, match="contiguous-kv excludes enable-prefix-caching"):
        EngineConfig(contiguous_kv=True)
    assert EngineConfig(contiguous_kv=True, enable_prefix_caching=False).contiguous_kv
