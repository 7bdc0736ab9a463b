"""Too little HBM, at each stage of a start, and buckets that cover too little: one line says what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from services.engine.core.errors import StartError
from services.engine.device import ExecutionMode
from tests.support.sim_device import EAGER, Host
from tests.support.torch_engine import LocalCore, save_tiny_model, tiny_options

_MIB = 1 / 1024
LIMITS: dict[str, Any] = {
    "max_model_len": 128,
    "block_size": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_prefill_batch": 2,
    "kv_cache_gib": None,
    "warmup": "full",
    "device": "sim",
}

Start = Callable[..., LocalCore]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    host = Host(monkeypatch, tmp_path)

    def begin(mode: ExecutionMode, hbm_mib: float, **options: Any) -> LocalCore:
        host.prepare(mode, hbm_gib=hbm_mib * _MIB)
        values = {**LIMITS, "cache_dir": str(tmp_path), "enforce_eager": mode in EAGER, **options}
        return LocalCore(tiny_options(model, **values))

    return begin


def refusal(start: Start, hbm_mib: float, mode: ExecutionMode = ExecutionMode.GRAPH, **options: Any) -> str:
    with pytest.raises(StartError) as caught:
        start(mode, hbm_mib, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_no_room_for_the_weights(start: Start) -> None:
    assert refusal(start, 0.1).startswith("the model's weights take 0.00 GiB in float32 and 0.00 GiB of the")


def test_no_room_for_the_largest_forward(start: Start) -> None:
    text = refusal(start, 0.35)
    assert text.startswith("the largest prefill batch_size:2 query_len:32 num_blocks:8 does not fit the 0.00")
    assert text.endswith("lower max-num-batched-tokens, max-num-seqs or max-model-len")


def test_no_room_for_the_kv_of_a_sequence(start: Start) -> None:
    text = refusal(start, 8, gpu_memory_utilization=0.002)
    assert text.startswith(
        "a sequence of max-model-len 128 needs 0.00 GiB of KV cache and 0.00 GiB are there"
    )
    assert text.endswith("lower max-model-len or raise kv-cache-gib")
    text = refusal(start, 8, kv_cache_gib=0.5)
    assert text.startswith("kv-cache-gib 0.5 exceeds the memory that is free: 0.01 GiB, of which activations")


def test_no_room_for_the_graphs(start: Start) -> None:
    # A graph takes a MiB of the simulated card, and a tenth of what is usable is theirs.
    with structlog.testing.capture_logs() as logs:
        core = start(ExecutionMode.GRAPH, 64)
    said = [entry["event"] for entry in logs if entry["log_level"] == "warning"]
    assert "buckets over the graph budget run eagerly or in a larger one: raise graph-reserved-mem" in said
    key = core.submit([5, 6, 7], max_tokens=4)
    core.run()
    assert len(core.outputs[key].token_ids) == 4
    core.engine.close()


def test_no_room_left_for_the_warm_up(start: Start) -> None:
    text = refusal(start, 0.5)
    assert text.startswith("no memory is left to run ")
    assert "lower gpu-memory-utilization, kv-cache-gib" in text


def test_a_bucket_list_that_does_not_cover_every_step(start: Start, tmp_path: Path) -> None:
    listed = tmp_path / "buckets.txt"
    listed.write_text("(1, 16, 0)\n(1, 1, 2)\n")
    with structlog.testing.capture_logs() as logs:
        core = start(ExecutionMode.EAGER, 64, bucketing_strategy="file", bucketing_file=str(listed))
    said = [entry["event"] for entry in logs if entry["log_level"] == "warning"]
    assert (
        "the listed buckets do not cover every prefill step, so (1, 64, 8) is added: list one like it" in said
    )
    assert any(text.startswith("the listed buckets do not cover every decode step, so (") for text in said)
    # A prompt that none of the listed ones holds.
    key = core.submit(list(range(3, 103)), max_tokens=4)
    core.run()
    assert len(core.outputs[key].token_ids) == 4
    assert core.engine.graphs.first_seen == 0
    core.engine.close()


@pytest.mark.parametrize(
    ("mode", "share"),
    [(ExecutionMode.GRAPH, 0.1), (ExecutionMode.COMPILE, 0.1), (ExecutionMode.EAGER, 0.0)],
)
def test_the_modes_that_keep_recipes_leave_them_memory(
    start: Start, mode: ExecutionMode, share: float
) -> None:
    """vLLM's plugin takes VLLM_GRAPH_RESERVED_MEM in both modes."""
    with structlog.testing.capture_logs() as logs:
        core = start(mode, 64, warmup="skip", gpu_memory_utilization=0.5)
    core.engine.close()
    found = {
        name: float(str(line["event"]).split(" MiB")[0].split()[-1])
        for line in logs
        for name in ("usable", "graphs")
        if str(line["event"]).startswith(f"{name} ")
    }
    assert found["usable"] > 10
    assert found.get("graphs", 0.0) == pytest.approx(found["usable"] * share, abs=0.01)
