"""Users' bug reports, section G, on the engine's HPU code: graphs, warm-up, memory, odd limits."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from services.engine.bucketing import Bucket
from services.engine.core.errors import StartError
from services.engine.device import ExecutionMode, sim
from services.engine.device.sim.settings import out_of_memory
from services.engine.device.sim.tensor import Block, Hbm
from services.engine.graphs import Phase
from tests.support.sim_cores import SIZES, SimCores, answer, whole, work_of
from tests.support.sim_device import Host
from tests.support.torch_engine import VOCAB, LocalCore, save_tiny_model

MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def cores(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimCores]:
    directory = tmp_path_factory.mktemp("host")
    with pytest.MonkeyPatch.context() as patch:
        yield SimCores(Host(patch, directory), model, directory)
        sim.card().release()


def test_c64_c65_replayed_graphs_keep_no_mask_and_requests_capture_and_leak_nothing(cores: SimCores) -> None:
    expected = cores.cpu()
    core = cores.start()
    warm, replays = work_of(core), sim.card().counters.replays
    # C64: a graph that was replayed for a long answer has nothing of it left.
    for length in (1, 25):
        prompt = [7 + index % 40 for index in range(length)]
        short, long, again = (answer(core, prompt, count) for count in (5, 50, 5))
        assert long == answer(expected, prompt, 50)
        assert short == long[:5] == again
    assert sim.card().counters.replays - replays > 100
    # C65: neither the host's memory nor the card's grows with requests.
    chance = random.Random(3)

    def serve(count: int) -> tuple[int, int]:
        for _ in range(count):
            prompt = [chance.randrange(3, VOCAB) for _ in range(chance.randint(1, 60))]
            core.submit(prompt, max_tokens=chance.randint(1, 8))
        core.run()
        core.outputs.clear()
        core.link.sent.clear()
        gc.collect()
        return int(psutil.Process().memory_info().rss), sim.card().hbm.in_use

    serve(20)
    rss, in_use = serve(20)
    rss_after, in_use_after = serve(60)
    assert rss_after - rss < 8 * MIB
    assert in_use_after == in_use
    assert work_of(core) == warm


def test_c66_a_warm_up_without_memory_for_large_graphs_serves_all_the_same(
    cores: SimCores, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Hbm.take

    def scarce(hbm: Hbm, size: int) -> Block:
        # A graph takes a MiB and a part of what its products give: 4 kB for prefills of 32 tokens.
        if size > MIB + 3_000:
            raise out_of_memory(size, hbm.free)
        return take(hbm, size)

    monkeypatch.setattr(Hbm, "take", scarce)
    with capture_logs() as logs:
        core = cores.start(kv_cache_gib=0.001)
    listed = [line for line in logs if line["event"].startswith("buckets without memory for a capture")]
    assert len(listed) == 1
    assert "prefill batch_size:1 query_len:32 num_blocks:0" in listed[0]["buckets"]
    captured = [key for key in core.engine.graphs.captured(Phase.PREFILL) if isinstance(key, Bucket)]
    assert captured
    assert max(bucket.batch * bucket.query for bucket in captured) < 32
    warm, expected = work_of(core), cores.cpu()
    for length in (5, 60):
        assert answer(core, [9] * length, 8) == answer(expected, [9] * length, 8)
    # What had no room for a graph was compiled in the warm-up nevertheless.
    assert work_of(core) == warm


# C62, and Gaudi users' 7.11: limits that are no powers of two and that the blocks do not divide.
def test_c62_the_longest_prompt_of_an_odd_limit_has_its_bucket(cores: SimCores) -> None:
    odd: dict[str, Any] = {
        "block_size": 48,
        "max_model_len": 1000,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 333,
        "max_prefill_batch": 1,
        "bucketing_strategy": "exponential",
        **dict.fromkeys(name for name in SIZES if name.startswith("bucket_")),
    }
    core, expected = cores.start(ExecutionMode.EAGER, **odd), cores.cpu(**odd)
    warm = work_of(core)
    prompt = [3 + index * index % 120 for index in range(999)]
    assert answer(core, prompt, 1) == answer(expected, prompt, 1)
    # From the same prefix to the last token that there can be.
    assert answer(core, prompt[:995], 5) == answer(expected, prompt[:995], 5)
    assert work_of(core) == warm


@pytest.mark.parametrize("mode", [ExecutionMode.EAGER, ExecutionMode.LAZY], ids=lambda mode: mode.value)
def test_c63_prompts_have_buckets_where_none_has_context(cores: SimCores, mode: ExecutionMode) -> None:
    # A forward holds the longest prompt, and nothing is cached: vllm-gaudi#352, and #761 for eager execution.
    options: dict[str, Any] = {
        "max_model_len": 32,
        "max_num_batched_tokens": 32,
        "enable_prefix_caching": False,
        "bucketing_strategy": "linear",
        "bucket_prefill_context": None,
        "bucket_decode_blocks": "min=8,step=8,max=8",
    }
    core = cores.start(mode, **options)
    warm, expected = work_of(core), cores.cpu(**options)
    prompts = [[5 + index] * length for index, length in enumerate((1, 7, 16, 17, 31))]
    keys = [(core.submit(prompt, max_tokens=1), expected.submit(prompt, max_tokens=1)) for prompt in prompts]
    core.run()
    expected.run()
    for key, wanted in keys:
        assert whole(core.outputs[key]).token_ids == expected.outputs[wanted].token_ids
    assert work_of(core) == warm


def quantize(source: Path, directory: Path, dtype: torch.dtype) -> None:
    """A copy whose projections are whole numbers with a scale, as INT8 and FP8 checkpoints store them."""
    for path in source.glob("*.json"):
        (directory / path.name).write_text(path.read_text())
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("proj.weight"):
            scale = tensor.abs().max() / 127
            tensors[name] = (tensor / scale).round().to(dtype)
            tensors[f"{name}_scale"] = scale.reshape(1)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


# C69, and Gaudi users' 7.28 and 7.29: what cannot be read rightly is refused before it is on the card.
@pytest.mark.parametrize("scheme", [None, "compressed-tensors", "awq", "gptq"])
def test_c69_quantized_checkpoints_are_refused_on_an_hpu(
    cores: SimCores, tmp_path: Path, scheme: str | None
) -> None:
    quantize(cores.model, tmp_path, torch.int8)
    path = tmp_path / "config.json"
    if scheme is not None:
        text = json.loads(path.read_text()) | {"quantization_config": {"quant_method": scheme}}
        path.write_text(json.dumps(text))
    other: LocalCore | None = None
    with pytest.raises(StartError) as refused:
        other = cores.start(model=str(tmp_path))
    assert other is None
    assert "not supported yet" in str(refused.value)
    assert "\n" not in str(refused.value)
