"""KV that is not a number is offered to nobody, whoever wrote it and whatever is in flight meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.domain import CoreErrorCode, FinishReason
from tests.support.torch_engine import LocalCore, save_tiny_model, tiny_options

PROMPT = [7, 7, 9, *range(20, 80)]
BLOCK = 8


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("tiny"))


def poison(core: LocalCore, phase: str, hit: Callable[[list[int]], bool]) -> None:
    """One forward, once: the first whose positions `hit` picks computes NaN everywhere, like a bad chip."""
    model: Any = core.engine.model
    forward = getattr(model, phase)

    def broken(*tensors: torch.Tensor) -> Any:
        found = forward(*tensors)
        if not hit(tensors[1].tolist()):
            return found
        setattr(model, phase, forward)
        for cache in model.caches:
            cache.key[tensors[2]] = torch.nan
            cache.value[tensors[2]] = torch.nan
        if phase == "decode":
            return torch.full_like(found, torch.nan)
        hidden, sound = found
        return torch.full_like(hidden, torch.nan), torch.zeros_like(sound)

    setattr(model, phase, broken)


# A chunk that fills blocks and samples nothing, one that goes on, the last one; a decode inside a block, and
# the one that completes it.
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize(
    ("phase", "position"),
    [("select", 0), ("select", 24), ("select", 62), ("decode", 66), ("decode", 71)],
)
def test_blocks_with_nan_are_never_hit(directory: Path, phase: str, position: int, overlaps: bool) -> None:
    core = LocalCore(tiny_options(directory, async_stepping=overlaps))
    first = LocalCore(tiny_options(directory, enable_prefix_caching=False))
    expected = first.submit(PROMPT, top_logprobs=0)
    first.run()
    poison(core, phase, lambda positions: position in positions)
    broken = core.submit(PROMPT, top_logprobs=0)
    core.run()
    end = core.outputs[broken].end
    assert end is not None
    assert (end.reason, end.error_code) == (FinishReason.ERROR, CoreErrorCode.INTERNAL)
    sound = first.outputs[expected]
    assert core.outputs[broken].token_ids == sound.token_ids[: end.completion_tokens]
    again = core.submit(PROMPT, top_logprobs=0)
    core.run()
    healed = core.outputs[again]
    assert healed.token_ids == sound.token_ids
    assert healed.logprobs == pytest.approx(sound.logprobs, abs=1e-5)
    assert healed.end is not None
    # What was computed before it went wrong is as good as any; the last block always is computed.
    assert healed.end.cached_tokens <= min(position, len(PROMPT) - 1) // BLOCK * BLOCK
    core.engine.scheduler.check()
    assert core.engine.scheduler.load().used_blocks == 0


@pytest.mark.parametrize("turns", range(1, 4))
def test_a_chunk_that_samples_nothing_ends_its_sequence_before_another_hits_it(
    directory: Path, turns: int
) -> None:
    first = LocalCore(tiny_options(directory, enable_prefix_caching=False))
    sound = [first.submit([5, 11, 80, 3], max_tokens=30), first.submit(PROMPT)]
    first.run()
    core = LocalCore(tiny_options(directory))
    neighbour = core.submit([5, 11, 80, 3], max_tokens=30)
    core.step()
    poison(core, "select", lambda positions: 8 in positions)
    broken = core.submit(PROMPT)
    for _ in range(turns):
        core.turn()
    # It comes while the blocks that it would hit are computed, or found out.
    follower = core.submit(PROMPT)
    core.run()
    end = core.outputs[broken].end
    assert end is not None
    assert end.reason is FinishReason.ERROR
    # Nobody waited for the prompt's end to look at it.
    assert core.outputs[broken].token_ids == []
    assert core.outputs[neighbour].token_ids == first.outputs[sound[0]].token_ids
    assert core.outputs[follower].token_ids == first.outputs[sound[1]].token_ids
