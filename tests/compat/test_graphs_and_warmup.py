"""Users' bug reports, section G: graphs, warm-up and what it does without memory."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch

from services.engine.bucketing import Bucket
from services.engine.domain import FinishReason
from services.engine.graphs import Phase
from tests.support.graph_device import GraphDevice
from tests.support.torch_engine import LocalCore, save_tiny_model, tiny_options

MIB = 2**20


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("tiny"))


def start(directory: Path, cache: Path, device: GraphDevice) -> LocalCore:
    options = tiny_options(
        directory, max_model_len=96, cache_dir=str(cache), max_capture_tokens=4096, warmup="full"
    )
    return LocalCore(options, device)


def answer(core: LocalCore, prompt: list[int], max_tokens: int) -> list[int]:
    key = core.submit(prompt, max_tokens=max_tokens)
    core.run()
    return core.outputs[key].token_ids


@pytest.mark.parametrize("length", [1, 9, 30])
def test_c64_a_replayed_graph_keeps_no_mask_of_an_earlier_request(
    directory: Path, tmp_path: Path, length: int
) -> None:
    device = GraphDevice()
    core = start(directory, tmp_path, device)
    before = sum(replay.count for replay in device.replays)
    prompt = [7 + index % 40 for index in range(length)]
    short, long, again = (answer(core, prompt, count) for count in (5, 50, 5))
    assert len(long) == 50
    assert short == long[:5] == again
    # It was graphs that answered, not an eager detour.
    assert sum(replay.count for replay in device.replays) - before > 50


def test_c65_requests_after_warm_up_capture_nothing_and_leak_nothing(directory: Path, tmp_path: Path) -> None:
    device = GraphDevice()
    core = start(directory, tmp_path, device)
    captures = len(device.replays)
    chance = random.Random(3)

    def serve(count: int) -> int:
        for _ in range(count):
            length = chance.randint(1, 60)
            core.submit([chance.randrange(3, 128) for _ in range(length)], max_tokens=chance.randint(1, 8))
        core.run()
        core.outputs.clear()
        core.link.sent.clear()
        gc.collect()
        return int(psutil.Process().memory_info().rss)

    serve(50)
    settled = serve(50)
    assert serve(100) - settled < 8 * MIB
    assert len(device.replays) == captures
    assert core.engine.graphs.first_seen == 0


def test_c66_buckets_without_memory_are_skipped_and_listed_and_requests_served(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_large(tensors: Sequence[torch.Tensor]) -> bool:
        # A forward's numbers come as one tensor: over 128 of them for every prefill of more than 16 tokens.
        return tensors[0].dtype is torch.int64 and tensors[0].numel() > 128

    expected = {
        length: answer(start(directory, tmp_path, GraphDevice()), [9] * length, 8) for length in (5, 60)
    }
    capsys.readouterr()
    core = start(directory, tmp_path, GraphDevice(fails=too_large))
    listed = capsys.readouterr().out
    assert "buckets without memory for a capture run eagerly or in another one" in listed
    assert "batch_size:1 query_len:24 num_blocks:0" in listed
    captured = [key for key in core.engine.graphs.captured(Phase.PREFILL) if isinstance(key, Bucket)]
    assert captured
    assert max(bucket.batch * bucket.query for bucket in captured) <= 16
    for length, tokens in expected.items():
        assert answer(core, [9] * length, 8) == tokens
    assert all(
        output.end is not None and output.end.reason is FinishReason.LENGTH
        for output in core.outputs.values()
    )
    assert core.engine.graphs.first_seen == 0
