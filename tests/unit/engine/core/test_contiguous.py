"""KV that decode fetches as one slice, kept dense by moving blocks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.config import EngineConfig
from services.engine.domain import FinishReason
from services.engine.link import AbortSequences
from services.engine.model.decoder import NativeDecoderModel
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
    copy, decode = PagedModel.copy_blocks, NativeDecoderModel.decode

    def spy(model: PagedModel, sources: torch.Tensor, targets: torch.Tensor, tokens: torch.Tensor) -> None:
        moved.append(int((sources != targets).sum()))
        copy(model, sources, targets, tokens)

    def spy_on_blocks(model: NativeDecoderModel, *args: torch.Tensor) -> torch.Tensor:
        listed.append(args[3].shape[0])
        hidden: torch.Tensor = decode(model, *args)
        return hidden

    monkeypatch.setattr(PagedModel, "copy_blocks", spy)
    monkeypatch.setattr(NativeDecoderModel, "decode", spy_on_blocks)
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


def test_a_step_that_fails_before_its_moves_ends_those_whose_blocks_moved(directory: Path) -> None:
    options: dict[str, Any] = {
        "enable_prefix_caching": False,
        "max_prefill_batch": 1,
        "max_num_batched_tokens": 16,
    }
    plain = LocalCore(tiny_options(directory, **options))
    dense = LocalCore(tiny_options(directory, contiguous_kv=True, **options))
    executor: Any = dense.engine.runner.executor
    forward = executor.forward
    failed: list[int] = []

    def failing(inputs: Any) -> Any:
        if inputs.moves is not None and not failed:
            failed.append(1)
            raise RuntimeError("the device is unhappy")
        return forward(inputs)

    executor.forward = failing
    first = dense.submit([9] * 60)
    while not dense.outputs[first].token_ids:
        dense.step()
    # Their prompts take turns, so one of them is not in the step that moves the blocks of both.
    prompts = [[5, 7 + i] * 30 for i in range(2)]
    keys = [dense.submit(prompt, max_tokens=5) for prompt in prompts]
    dense.step()
    dense.step()
    dense.loop.handle(AbortSequences([first]))
    dense.run()
    assert failed
    for key in keys:
        end = dense.outputs[key].end
        assert end is not None
        assert end.reason is FinishReason.ERROR
    again = [core.submit(prompts[0], max_tokens=5) for core in (plain, dense)]
    plain.run()
    dense.run()
    assert dense.outputs[again[1]].token_ids == plain.outputs[again[0]].token_ids
    dense.engine.scheduler.check()


def test_contiguous_kv_excludes_prefix_caching() -> None:
    with pytest.raises(ValueError, match="contiguous-kv excludes enable-prefix-caching"):
        EngineConfig(contiguous_kv=True)
    assert EngineConfig(contiguous_kv=True, enable_prefix_caching=False).contiguous_kv
