"""What a core with a real model tells of its prefix cache, and counts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from catenary.blockhash import BlockHashes
from services.engine.link import CoreStep, FollowKv, KvChanges, KvContents
from services.engine.scheduler import StepPlan
from tests.support.kv_follower import names_of
from tests.support.torch_engine import LocalCore, save_tiny_model, tiny_options


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("tiny"))


def followed(news: Iterable[KvContents | KvChanges]) -> set[bytes]:
    """What somebody knows who was told all of this."""
    names: set[bytes] = set()
    for message in news:
        if isinstance(message, KvContents):
            names = set() if message.first else names
            names |= set(names_of(message.names))
            continue
        assert not message.cleared
        removed, stored = set(names_of(message.removed)), set(names_of(message.stored))
        assert removed <= names
        assert not stored & names
        names = (names - removed) | stored
    return names


def block_names(core: LocalCore, token_ids: list[int]) -> set[bytes]:
    hashes = BlockHashes(core.engine.ready.capacity.block_size)
    hashes.extend(token_ids)
    return set(hashes.hashes)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_follower_knows_what_can_be_hit_and_counters_what_was(directory: Path, overlaps: bool) -> None:
    core = LocalCore(tiny_options(directory, async_stepping=overlaps))
    assert core.engine.ready.publishes_kv
    prompt = [5 + index % 7 for index in range(50)]
    first = core.submit(prompt, max_tokens=20)
    core.run()
    assert core.kv_event_delta == []
    # An idle core answers at once.
    core.loop.handle(FollowKv())
    core.turn()
    left = block_names(core, [*prompt, *core.outputs[first].token_ids][:-1])
    assert core.kv_event_delta == [core.kv_event_delta[0]]
    assert isinstance(core.kv_event_delta[0], KvContents)
    assert followed(core.kv_event_delta) == left
    again = core.submit(prompt, max_tokens=20)
    core.run()
    # The same tokens fill the same blocks: nothing changes.
    assert len(core.kv_event_delta) == 1
    # Others do not fit beside them, and take their place.
    for start in range(10, 60):
        core.submit([start + index % 11 for index in range(60)], max_tokens=4)
    core.run()
    told = followed(core.kv_event_delta)
    assert told == set(core.engine.scheduler.kv_events.names())
    assert not left <= told
    counts = core.engine.scheduler.counts
    end = core.outputs[again].end
    assert end is not None
    assert end.cached_tokens > 0
    assert counts.prompt_tokens == 100 + 50 * 60
    assert counts.cached_prompt_tokens == sum(
        output.end.cached_tokens for output in core.outputs.values() if output.end
    )
    (load,) = (step.load for step in core.link.sent[-1:] if isinstance(step, CoreStep))
    assert (load.prompt_tokens, load.cached_prompt_tokens) == (
        counts.prompt_tokens,
        counts.cached_prompt_tokens,
    )


def test_without_a_prefix_cache_there_is_nothing_to_follow(directory: Path) -> None:
    core = LocalCore(tiny_options(directory, enable_prefix_caching=False))
    assert not core.engine.ready.publishes_kv


def test_who_gives_way_is_counted(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = LocalCore(tiny_options(directory, kv_cache_gib=0.0002))
    preempted: list[Any] = []
    scheduler, plan = core.engine.scheduler, core.engine.scheduler.plan

    def noted() -> StepPlan | None:
        made = plan()
        preempted.extend(() if made is None else made.preempted)
        return made

    monkeypatch.setattr(scheduler, "plan", noted)
    for start in range(8):
        core.submit([start + 3] * 20, max_tokens=200)
    core.run()
    assert scheduler.counts.preemptions == len(preempted) > 0
    assert scheduler.counts.prompt_tokens == 160
