"""A whole core whose sampling runs in static shapes: nothing new after warm-up, and the tokens of the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from services.engine.device import Stream, Submitted
from services.engine.device.base import run_now
from services.engine.options import EngineOptions
from tests.support.constrained import regex, save_constrained_model
from tests.support.graph_device import GraphDevice
from tests.support.static_sampling import ShapeWatch, StaticCpu
from tests.support.torch_engine import VOCAB, LocalCore, Output, save_tiny_model, tiny_options

REQUESTS = 100
Result = TypeVar("Result")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


class WatchedStream(Stream):
    """Notes every operation of submitted work, which runs at once."""

    def __init__(self) -> None:
        self.watch = ShapeWatch()

    def synchronize(self) -> None:
        return

    def submit(self, work: Callable[[], Result]) -> Submitted[Result]:
        def watched() -> Result:
            with self.watch:
                return work()

        return run_now(watched)


class WatchedCpu(StaticCpu):
    def __init__(self) -> None:
        super().__init__()
        self.stream = stream = WatchedStream()
        self.watch = stream.watch


def request(rng: random.Random) -> tuple[list[int], dict[str, Any]]:
    """Any parameters; half of the values of each are off."""
    tokens = [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 5, 30, 60]))]
    choices: dict[str, list[Any]] = {
        "temperature": [0.0, 0.0, 0.7, 2.0],
        "top_k": [0, 0, 3, 40],
        "top_p": [1.0, 1.0, 0.5, 0.95],
        "min_p": [0.0, 0.0, 0.1],
        "repetition_penalty": [1.0, 1.0, 1.4],
        "presence_penalty": [0.0, 0.0, 1.0],
        "frequency_penalty": [0.0, 0.0, 0.6],
        "logit_bias": [(), (), ((5, 4.0), (tokens[0], -100.0))],
        "bad_words": [(), (), ((7,), (tokens[-1], 9), (8, 9, 10))],
        "allowed_token_ids": [(), (), (), tuple(range(3, 60))],
        "keep_top_k_duplicates": [True, False],
        "top_logprobs": [-1, -1, 0, 5],
        "prompt_logprobs": [-1, -1, -1, 2],
        "min_tokens": [0, 0, 4],
        "stop_token_ids": [[], [9, 20, 31]],
        "max_tokens": [1, 6, 12],
        "seed": list(range(50)),
    }
    return tokens, {name: rng.choice(values) for name, values in choices.items()}


def options_of(directory: Path) -> EngineOptions:
    """Room for fewer tokens than eight sequences have in the end: some are preempted."""
    return tiny_options(
        directory, bucketing_strategy="exponential", max_model_len=96, kv_cache_gib=16 / 2**20
    )


def serve(core: LocalCore, seed: int = 3, count: int = REQUESTS) -> dict[int, Output]:
    """Runs requests that come a few at a time."""
    rng = random.Random(seed)
    left = count
    while left or core.loop.work.busy:
        for _ in range(min(left, rng.randrange(4))):
            tokens, options = request(rng)
            core.submit(tokens, **options)
            left -= 1
        core.turn()
    return core.outputs


def same(found: dict[int, Output], expected: dict[int, Output]) -> None:
    assert found.keys() == expected.keys()
    for key, output in expected.items():
        assert found[key].token_ids == output.token_ids
        assert found[key].logprobs == pytest.approx(output.logprobs, abs=1e-5)
        assert [list(top) for top in found[key].tops] == [list(top) for top in output.tops]
        assert [list(top) for _, top in found[key].prompt] == [list(top) for _, top in output.prompt]
        values = [value for value, _ in output.prompt]
        assert [value for value, _ in found[key].prompt] == pytest.approx(values, abs=1e-5)


def test_nothing_is_new_after_warm_up(directory: Path) -> None:
    device = WatchedCpu()
    core = LocalCore(options_of(directory), device)
    known, copies = set(device.watch.seen), device.stream.host_copies
    scheduler: Any = core.engine.scheduler
    preempted: list[object] = []
    preempt = scheduler.planner.preempt

    def noted(victim: object) -> object:
        preempted.append(victim)
        return preempt(victim)

    scheduler.planner.preempt = noted
    found = serve(core)
    assert preempted
    assert not device.watch.seen - known
    assert core.engine.graphs.first_seen == 0
    same(found, serve(LocalCore(options_of(directory))))
    assert copies == 0
    assert core.engine.runner.launches < device.stream.host_copies < 2 * core.engine.runner.launches


def test_a_step_has_one_copy_but_for_prompt_scores(directory: Path) -> None:
    device = StaticCpu()
    core = LocalCore(options_of(directory), device)
    for temperature in (0.0, 0.8):
        core.submit([5] * 30, temperature=temperature, top_p=0.9, top_logprobs=3)
    core.run()
    assert device.stream.host_copies == core.engine.runner.launches > 0
    before = device.stream.host_copies - core.engine.runner.launches
    core.submit([5] * 30, prompt_logprobs=3, max_tokens=2)
    core.run()
    # Two chunks of the prompt have scores.
    assert device.stream.host_copies - core.engine.runner.launches == before + 2


@pytest.mark.parametrize("graphs", [False, True])
def test_masks_are_of_known_shapes(tmp_path: Path, graphs: bool) -> None:
    directory = save_constrained_model(tmp_path)
    watched = WatchedCpu()
    device = GraphDevice(static_shapes=True) if graphs else watched
    core, plain = LocalCore(options_of(directory), device), LocalCore(options_of(directory))
    known = set(watched.watch.seen)
    for each in (core, plain):
        rng = random.Random(6)
        for index in range(24):
            tokens, options = request(rng)
            constraint = regex("(yes|no)( [a-z]{1,9}){3}") if index % 3 else None
            each.submit(tokens, **{**options, "allowed_token_ids": ()}, constraint=constraint)
            each.turn()
        each.run()
    same(core.outputs, plain.outputs)
    assert core.engine.graphs.first_seen == 0
    assert not watched.watch.seen - known


def test_all_of_it_is_captured_where_there_are_graphs(directory: Path) -> None:
    device = GraphDevice(static_shapes=True)
    core = LocalCore(options_of(directory), device)
    captured = len(device.replays)
    few = 30
    same(serve(core, count=few), serve(LocalCore(options_of(directory)), count=few))
    assert core.engine.graphs.first_seen == 0
    assert len(device.replays) == captured
