"""An engine starts with the memory and the buckets that `catenary plan` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from catenary_apps.plan.config import PlanConfig
from catenary_apps.plan.planning import make_plan
from services.engine.core import startup
from services.engine.core.sizing import Sizing, size_engine
from tests.support.graph_device import GIB, GraphDevice
from tests.support.torch_engine import LocalCore, save_tiny_model, tiny_options

LIMITS: dict[str, Any] = {
    "max_model_len": 100,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "block_size": 8,
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gpu_memory_utilization": 0.5, "graph_reserved_mem": 0.4},
        {
            "bucketing_strategy": "linear",
            "bucket_prefill_query": "min=8,step=16,max=32",
            "bucket_decode_batch": "step=4",
        },
        {"bucketing_strategy": "padding", "bucketing_pad_max_tokens": 16, "bucket_decode_blocks": "step=4"},
        {"contiguous_kv": True},
    ],
)
def test_an_engine_is_what_was_planned(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Sizing] = []

    def sized(*arguments: Any) -> Sizing:
        seen.append(size_engine(*arguments))
        return seen[-1]

    monkeypatch.setattr(startup, "size_engine", sized)
    directory = save_tiny_model("llama", tmp_path / "model")
    served = {"dtype": "bfloat16", "kv_cache_gib": None, "cache_dir": str(tmp_path), "warmup": "skip"}
    caching = {"enable_prefix_caching": not options.get("contiguous_kv", False)}
    chosen = tiny_options(directory, **(LIMITS | served | caching | options))
    core = LocalCore(chosen, device=GraphDevice(memory_bytes=1 << 23))
    (sizing,) = seen
    planned = make_plan(
        PlanConfig(
            model=str(directory),
            free_gib=sizing.memory.available / GIB,
            # Without one it would look for the share that its own graphs need.
            **({"graph_reserved_mem": chosen.graph_reserved_mem} | LIMITS | options),
        )
    )
    assert planned.kv == sizing.kv
    assert planned.kv.num_blocks == core.engine.ready.capacity.total_blocks
    assert planned.memory.usable == sizing.memory.usable
    assert planned.memory.graphs == sizing.memory.graphs
    assert planned.memory.kv == sizing.memory.kv
    assert planned.plan.prefill == sizing.buckets.prefill
    assert planned.plan.decode == sizing.buckets.decode
