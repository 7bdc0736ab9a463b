"""The memory plan: the worked examples of Gaudi users, and every refusal with its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.bucketing import Bucket
from services.engine.memory import (
    GraphHistory,
    GraphReserve,
    InsufficientMemory,
    KvPlan,
    MemoryPlan,
    ModelFigures,
    estimate_activations,
    history_key,
    memory_table,
    plan_kv,
    plan_memory,
)

GIB = 2**30
# Llama 3.1 8B in bfloat16: 2 * 32 layers * 8 heads * 128 dims * 128 tokens * 2 bytes.
LLAMA_BLOCK = 2 * 32 * 8 * 128 * 128 * 2


def plan(free_gib: float, utilization: float, share: float, **options: Any) -> MemoryPlan:
    return plan_memory(
        total=96 * GIB,
        weights=15 * GIB,
        free=int(free_gib * GIB),
        utilization=utilization,
        activations=options.pop("activations", 0) or 0,
        reserve=GraphReserve(share, options.pop("measured", None)),
        **options,
    )


def test_example_a() -> None:
    memory = plan(79.16, 0.5, 0.4)
    assert round(memory.usable / GIB, 2) == 39.58
    assert round(memory.graphs / GIB, 2) == 15.83
    assert round(memory.kv / GIB, 2) == 23.75
    assert memory.kv // LLAMA_BLOCK == 1519
    assert blocks_of(memory, 4, 2048) == 1519


def blocks_of(memory: MemoryPlan, max_num_seqs: int, max_model_len: int) -> int:
    """What an engine with prefix caching makes of it, on a device whose memory is its own."""
    return plan_kv(
        budget_bytes=memory.kv,
        bytes_per_token=LLAMA_BLOCK // 128,
        block_size=128,
        max_num_seqs=max_num_seqs,
        model_limit=131_072,
        max_model_len=max_model_len,
        spare=True,
    ).num_blocks


def test_example_a_from_what_was_logged_before_it() -> None:
    # 94.62 GiB of a card, 14.97 GiB of weights, 504 MiB of the profile run.
    weights, total = int(14.97 * GIB), int(94.62 * GIB)
    memory = plan_memory(
        total=total,
        weights=weights,
        free=total - weights,
        utilization=0.5,
        activations=504 * 2**20,
        reserve=GraphReserve(0.4),
        padding=LLAMA_BLOCK,
    )
    assert round(memory.available / GIB, 2) == 79.16
    assert round(memory.usable / GIB, 2) == 39.58
    assert round(memory.graphs / GIB, 2) == 15.83
    assert round(memory.kv / GIB, 2) == 23.75
    assert blocks_of(memory, 4, 2048) == 1519


def test_the_padding_block_is_paid_even_if_all_is_usable() -> None:
    memory = plan(10, 1.0, 0, activations=GIB, padding=LLAMA_BLOCK)
    assert memory.kv == 9 * GIB - LLAMA_BLOCK
    assert plan(10, 0.9, 0, activations=GIB, padding=LLAMA_BLOCK).kv == memory.available * 9 // 10


def test_example_b() -> None:
    # The log rounds: 79.22 stands for anything from 79.215 to 79.225 GiB.
    memory = plan(79.2248, 0.9, 0.1)
    assert round(memory.usable / GIB, 2) == 71.30
    assert round(memory.graphs / GIB, 2) == 7.13
    assert round(memory.kv / GIB, 2) == 64.17
    assert memory.kv // LLAMA_BLOCK == 4107


def test_utilization_scales_what_is_free_and_not_the_device() -> None:
    memory = plan(50, 0.9, 0)
    assert memory.usable == 45 * GIB
    assert memory.kv == 45 * GIB


def test_activations_and_a_measurement_of_graphs_come_off_the_kv() -> None:
    memory = plan(50, 0.8, 0.1, activations=2 * GIB, measured=1 * GIB)
    # With a tenth of headroom over the last run.
    assert memory.graphs == int(1.1 * GIB)
    assert memory.graphs_measured
    assert memory.kv == int(48 * GIB * 0.8) - int(1.1 * GIB)
    assert plan(50, 0.8, 0.1, measured=100 * GIB).graphs == 20 * GIB
    assert plan(50, 0.8, 0.1, measured=0).graphs == 0


def test_a_device_may_limit_kv_and_the_operator_may_name_its_size() -> None:
    assert plan(50, 0.9, 0, kv_limit=2 * GIB).kv == 2 * GIB
    assert plan(1, 0.5, 0, kv_limit=2 * GIB).kv == GIB // 2
    # A size of the operator's may exceed the utilization, but not what is free.
    assert plan(50, 0.5, 0, kv_limit=2 * GIB, kv_bytes=40 * GIB).kv == 40 * GIB
    with pytest.raises(
        InsufficientMemory,
        match=r"kv-cache-gib 49 exceeds the memory that is free: 50\.00 GiB, of which activations take "
        r"2\.00 GiB, graphs 0\.00 GiB and the padding block 0\.00 GiB: lower it",
    ):
        plan(50, 0.5, 0, activations=2 * GIB, kv_bytes=49 * GIB)


def test_a_sequence_that_does_not_fit_is_refused_with_the_numbers() -> None:
    def divide(budget: int, *, spare: bool = False) -> KvPlan:
        return plan_kv(
            budget_bytes=budget,
            bytes_per_token=LLAMA_BLOCK // 128,
            block_size=128,
            max_num_seqs=4,
            model_limit=131_072,
            max_model_len=8192,
            spare=spare,
        )

    assert divide(2 * GIB) == KvPlan(num_blocks=128, max_model_len=8192)
    assert divide(GIB) == KvPlan(num_blocks=64, max_model_len=8192)
    # Four sequences use no more; all of it is used to keep prefixes.
    assert divide(50 * GIB).num_blocks == 256
    assert divide(50 * GIB, spare=True).num_blocks == 3200
    with pytest.raises(
        InsufficientMemory,
        match=r"a sequence of max-model-len 8192 needs 1\.00 GiB of KV cache and 1\.00 GiB are there for it, "
        r"enough for 8064 tokens: lower max-model-len or raise kv-cache-gib",
    ):
        divide(GIB - 1)
    # Nothing left at all, as after a model that fills the device.
    with pytest.raises(InsufficientMemory, match=r"0\.00 GiB are there for it, enough for 0 tokens"):
        divide(-GIB)


@given(
    st.integers(0, 200 * GIB),
    st.floats(0.01, 1),
    st.floats(0, 0.9),
    st.integers(0, 20 * GIB),
    st.none() | st.integers(0, 300 * GIB),
)
def test_the_parts_never_exceed_what_is_usable(
    free: int, utilization: float, share: float, activations: int, measured: int | None
) -> None:
    memory = plan_memory(
        total=free,
        weights=0,
        free=free,
        utilization=utilization,
        activations=activations,
        reserve=GraphReserve(share, measured),
    )
    assert memory.usable <= max(0, free - activations)
    assert memory.kv + memory.graphs == min(memory.usable, free - activations)


def test_the_table_says_where_each_number_comes_from() -> None:
    memory = plan(50, 0.9, 0.1, activations=GIB)
    lines = memory_table(memory, KvPlan(1000, 8192), block_bytes=LLAMA_BLOCK, activations_measured=True)
    text = "\n".join(lines)
    for part in (
        "weights                       15.00 GiB",
        "activations                    1.00 GiB  measured",
        "usable                        44.10 GiB  gpu-memory-utilization 0.9",
        "graphs                         4.41 GiB  reserved",
        "KV cache                      15.62 GiB  1000 blocks, sequences of up to 8192 tokens",
    ):
        assert part in text
    eager = memory_table(plan(50, 0.9, 0), KvPlan(1, 1), block_bytes=1, activations_measured=False)
    assert not any(line.startswith("graphs") for line in eager)
    assert any("estimated" in line for line in eager)


def test_the_estimate_grows_with_each_dimension() -> None:
    model = ModelFigures(hidden_size=576, vocab_size=49152, heads=9, kv_bytes_per_token=768, item_size=2)

    def estimate(prefill: Bucket, decode: Bucket, rows: int = 1) -> int:
        return estimate_activations(model, prefill, decode, block_size=32, rows=rows)

    small = Bucket(1, 1, 0), Bucket(1, 1, 1)
    base = estimate(*small)
    assert estimate(Bucket(4, 128, 256), small[1]) > estimate(Bucket(4, 128, 0), small[1]) > base
    # Measured on a CPU with SmolLM2: 250 MiB.
    assert 250 * 2**20 < estimate(small[0], Bucket(32, 1, 8192)) < 500 * 2**20
    assert estimate(*small, rows=32) > base


def test_a_measurement_is_kept_and_a_damaged_one_ignored(tmp_path: Path) -> None:
    history = GraphHistory(tmp_path, history_key(model="m", dtype="bfloat16"))
    assert history.read() is None
    history.write(12345)
    assert history.read() == 12345
    assert GraphHistory(tmp_path, history_key(model="m", dtype="float32")).read() is None
    (file,) = (tmp_path / "graphs").iterdir()
    for damage in ("", "{", "[]", '{"graph_bytes": "much"}', '{"graph_bytes": -1}', "\x00\xff"):
        file.write_text(damage)
        assert history.read() is None
    history.write(7)
    assert history.read() == 7


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    history = GraphHistory(blocked, "key")
    history.write(1)
    assert history.read() is None
