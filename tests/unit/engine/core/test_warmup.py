"""Warm-up of a whole core: after a full one nothing is new, and no kind of it changes a token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from services.engine.bucketing import Bucket
from services.engine.core import warming
from services.engine.core.errors import StartError
from services.engine.core.loop import CoreLoop
from services.engine.device import Device, ExecutionMode
from services.engine.domain import CoreErrorCode, FinishReason
from services.engine.graphs import Phase
from services.engine.link import CoreStep, StopCore
from tests.support.graph_device import GraphDevice
from tests.support.torch_engine import LocalCore, save_tiny_model, tiny_options

PROMPTS = [[3 + index] * (1 + 7 * index % 50) for index in range(12)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("tiny"))


def start(directory: Path, cache: Path, device: Device | None, **options: Any) -> LocalCore:
    values = {"max_model_len": 64, "cache_dir": str(cache), "max_capture_tokens": 40, **options}
    return LocalCore(tiny_options(directory, **values), device)


def finish_warm_up(core: LocalCore) -> None:
    while core.loop.warm_up():
        pass


def answers(core: LocalCore) -> list[list[int]]:
    keys = [core.submit(prompt, max_tokens=1 + index) for index, prompt in enumerate(PROMPTS)]
    core.run()
    return [core.outputs[key].token_ids for key in keys]


def test_no_kind_of_warm_up_changes_a_token(directory: Path, tmp_path: Path) -> None:
    expected = answers(start(directory, tmp_path, None, warmup="skip"))
    assert [len(tokens) for tokens in expected] == list(range(1, 13))
    for warmup in ("full", "background", "skip"):
        for mode in (ExecutionMode.GRAPH, ExecutionMode.EAGER):
            device = GraphDevice(mode=mode)
            core = start(directory, tmp_path, device, warmup=warmup)
            # Beside serving, the same requests meet a cold engine and then a warm one.
            assert answers(core) == expected
            finish_warm_up(core)
            assert answers(core) == expected
            assert bool(device.replays) is mode.captures


def test_warm_up_beside_serving_takes_over_step_by_step(directory: Path, tmp_path: Path) -> None:
    device = GraphDevice()
    core = start(directory, tmp_path, device, warmup="background")
    assert not device.replays
    core.submit([5] * 30, max_tokens=20)
    core.step()
    core.step()
    # Captures happen between the steps of a busy engine too.
    assert len(device.replays) > 0
    graphs = core.work.load().graphs
    assert 0 < graphs.warm < graphs.to_warm
    core.run()
    finish_warm_up(core)
    graphs = core.work.load().graphs
    assert graphs.warm == graphs.to_warm
    assert graphs.captured == len(device.replays)
    seen, eager = core.engine.graphs.first_seen, device.eager
    core.submit([5] * 20, max_tokens=20)
    core.run()
    assert core.engine.graphs.first_seen == seen
    # What is longer than max-capture-tokens, and clearing blocks, stays eager.
    assert device.eager - eager < 6


def test_progress_is_reported_while_an_idle_engine_warms_up(directory: Path, tmp_path: Path) -> None:
    core = start(directory, tmp_path, GraphDevice(), warmup="background")
    sent: list[CoreStep] = []

    class Link:
        def send(self, message: Any) -> None:
            sent.append(message)

        def poll(self, timeout: float | None = 0.0) -> list[Any]:
            return [StopCore()] if timeout is None else []

        def wake(self) -> None: ...

    link: Any = Link()
    CoreLoop(link, core.engine).run()
    warm = [step.load.graphs.warm for step in sent]
    assert warm == sorted(warm)
    assert warm[0] == 0
    assert warm[-1] == sent[-1].load.graphs.to_warm > 20


def test_after_a_full_warm_up_no_traffic_meets_a_new_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny_model(
        "llama",
        tmp_path,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    core = LocalCore(
        tiny_options(
            model, block_size=32, max_num_seqs=16, max_num_batched_tokens=128, max_waiting=64, warmup="full"
        )
    )
    assert core.engine.ready.model.max_model_len == 512
    chance = random.Random(5)
    sent = 0
    while sent < 500:
        for _ in range(min(chance.randint(1, 64), 500 - sent)):
            length = chance.randint(1, 511)
            core.submit(
                [chance.randrange(3, 128) for _ in range(length)],
                max_tokens=min(512 - length, chance.choice((1, 2, 8, 24))),
                temperature=chance.choice((0.0, 1.0)),
            )
            sent += 1
        core.run(20_000)
    ends = [output.end for output in core.outputs.values()]
    assert len(ends) == 500
    assert all(end is not None and end.reason is FinishReason.LENGTH for end in ends)
    assert core.engine.graphs.first_seen == 0
    assert "a shape that warm-up did not see" not in capsys.readouterr().out
    figures = core.work.load().graphs
    assert figures.prefill.tokens > 100_000
    assert figures.prefill.padding_tokens > 0
    assert figures.decode.padding_blocks > 0


def larger_than(numbers: int) -> Any:
    """True for forwards of more inputs: 81 are a prefill of 16 tokens without context, a decode is more."""
    return lambda tensors: tensors[0].dtype is torch.int64 and tensors[0].numel() > numbers


def test_memory_that_is_short_at_warm_up_makes_the_plan_smaller(directory: Path, tmp_path: Path) -> None:
    expected = answers(start(directory, tmp_path, None, warmup="skip"))
    device = GraphDevice(fails=larger_than(81))
    core = start(directory, tmp_path, device, warmup="full")
    captured = core.engine.graphs.captured(Phase.PREFILL)
    assert captured
    assert answers(core) == expected
    assert core.engine.graphs.first_seen == 0


def test_a_device_on_which_nothing_runs_refuses_to_start(directory: Path, tmp_path: Path) -> None:
    device = GraphDevice(fails_eagerly=larger_than(40))
    with pytest.raises(
        StartError,
        match=r"the largest prefill batch_size:\d+ query_len:\d+ num_blocks:\d+ does not fit the 1\.00 GiB "
        "that are free beside the weights: lower max-num-batched-tokens, max-num-seqs or max-model-len",
    ):
        start(directory, tmp_path, device, warmup="full")


def after_kv(device: GraphDevice, act: Callable[[], None]) -> GraphDevice:
    """Make a device act when the KV of the engine is allocated, after the profile's."""
    zeros = device.memory.zeros

    def watched(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if len(shape) == 3 and shape[0] > 16:
            act()
        return zeros(shape, dtype)

    device.memory.zeros = watched  # type: ignore[method-assign]
    return device


def test_a_bucket_without_memory_beside_the_kv_refuses_to_start(directory: Path, tmp_path: Path) -> None:
    device = GraphDevice()

    def end_memory() -> None:
        device.fails = device.fails_eagerly = larger_than(40)

    with pytest.raises(
        StartError,
        match=r"no memory is left to run \d+ buckets, the smallest of them .*: lower gpu-memory-util",
    ):
        start(directory, tmp_path, after_kv(device, end_memory), warmup="full")


def test_memory_that_ends_while_serving_ends_the_step_and_not_the_engine(
    directory: Path, tmp_path: Path
) -> None:
    device = GraphDevice(mode=ExecutionMode.EAGER)
    core = start(directory, tmp_path, device, warmup="skip")
    device.fails_eagerly = larger_than(120)
    for _ in range(5):
        large = core.submit([5] * 40)
        core.run()
        end = core.outputs[large].end
        assert end is not None
        assert end.error_code is CoreErrorCode.OVERLOADED
        assert end.error_message == "The engine's device has no memory for a step of this size."
    small = core.submit([5] * 6)
    core.run()
    assert len(core.outputs[small].token_ids) == 16
    assert core.engine.scheduler.load().used_blocks == 0


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(
        StartError,
        match=r"the model's weights take 0\.00 GiB in float32 and 0\.00 GiB of the device's memory are free: "
        "choose a smaller model or dtype",
    ):
        start(directory, tmp_path, GraphDevice(memory_bytes=1000))


def test_an_allocation_that_fails_at_start_is_a_refusal(directory: Path, tmp_path: Path) -> None:
    def refuse() -> None:
        raise MemoryError

    with pytest.raises(StartError, match=r"memory is full \(1\.00 GiB are free\) while the engine starts"):
        start(directory, tmp_path, after_kv(GraphDevice(), refuse))


def costly(tensors: Sequence[torch.Tensor]) -> int:
    return 2000 * tensors[0].numel()


def test_the_measured_graph_memory_replaces_the_reserve_at_the_next_start(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for label in ("reserved", "measured by the last run"):
        device = GraphDevice(cost=costly, memory_bytes=1 << 28)
        start(directory, tmp_path, device, warmup="full", kv_cache_gib=None)
        out = capsys.readouterr().out
        assert any("graphs " in line and line.endswith(label) for line in out.splitlines())
        assert device.held > 0


def test_the_budget_of_graphs_holds(directory: Path, tmp_path: Path) -> None:
    # A tenth of 90 % of 16 MiB is for graphs.
    device = GraphDevice(cost=costly, memory_bytes=1 << 24)
    core = start(directory, tmp_path, device, warmup="full", graph_reserved_mem=0.1, kv_cache_gib=0.0005)
    assert 0 < device.held < 1_510_000
    assert core.engine.graphs.captured(Phase.DECODE)
    answers(core)
    assert core.engine.graphs.first_seen == 0


def test_prompts_beyond_model_and_kv_are_refused_and_longer_than_a_bucket_are_chunked(
    directory: Path, tmp_path: Path
) -> None:
    # A forward takes 24 tokens, a sequence 64.
    core = start(directory, tmp_path, GraphDevice(), warmup="full", max_num_seqs=2)
    captured = [key for key in core.engine.graphs.captured(Phase.PREFILL) if isinstance(key, Bucket)]
    assert max(bucket.query for bucket in captured) == 24
    chunked, refused = core.submit([7] * 60, max_tokens=2), core.submit([7] * 64, max_tokens=2)
    core.run()
    assert len(core.outputs[chunked].token_ids) == 2
    end = core.outputs[refused].end
    assert end is not None
    assert end.error_code is CoreErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert core.engine.graphs.first_seen == 0


def test_a_warm_up_of_many_shapes_says_what_would_start_sooner(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "_MANY_SHAPES", 5)
    with capture_logs() as logs:
        core = start(directory, tmp_path, GraphDevice(), warmup="full")
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert "learned bucket file" in warning["event"]
    assert warning["shapes"] > 5
    assert answers(core)
