"""Options that change nothing are known by name: for a model that embeds, a device, a role."""

from __future__ import annotations

from typing import Any

import pytest

from services.engine.config import EngineConfig
from services.engine.option_groups import EMBEDDING, GENERATING
from services.engine.options import idle_options


@pytest.fixture(autouse=True)
def no_options_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CATENARY_ENGINE_ENGINE_SECRET_FILE", raising=False)


def idle(task: str = "generate", **options: Any) -> list[str]:
    return idle_options(EngineConfig(**options), task)


def test_facts_of_options_reach_the_configuration() -> None:
    fields = EngineConfig.model_fields
    assert GENERATING in fields["compile"].metadata
    assert EMBEDDING in fields["embedding_dimensions"].metadata
    assert GENERATING not in fields["stall_limit_s"].metadata


@pytest.mark.parametrize("task", ["generate", "embed", "score"])
@pytest.mark.parametrize("device", ["cpu", "sim", "hpu", "cuda"])
def test_nothing_is_idle_that_nobody_gave(task: str, device: str) -> None:
    assert idle(task, device=device) == []


def test_options_of_generating_engines_are_idle_where_documents_are_read() -> None:
    given: dict[str, Any] = {
        "max_num_seqs": 8,
        "kv_cache_gib": 1.0,
        "grammar_queue": 7,
        "bucketing_strategy": "linear",
    }
    for task in ("embed", "score"):
        assert idle(task, **given) == sorted(given)
    assert idle(**given) == []
    others: tuple[dict[str, Any], ...] = (
        {"compile": True},
        {"record_lengths": "/tmp/lengths"},
        {"max_beam_width": 2},
    )
    for option in others:
        assert idle("embed", **option) == list(option)
    # These are of both.
    assert idle("embed", max_waiting=9, warmup="full", quantization="int8", max_model_len=64) == []


def test_smaller_widths_are_of_models_that_embed() -> None:
    assert idle("embed", embedding_dimensions="64") == []
    assert idle("score", embedding_dimensions="64") == ["embedding_dimensions"]
    assert idle(embedding_dimensions="64") == ["embedding_dimensions"]


def test_a_cpu_keeps_no_memory_for_graphs() -> None:
    order: dict[str, Any] = {"graph_prompt_strategy": "max_bs"}
    assert idle(graph_reserved_mem=0.2, max_capture_tokens=64, **order) == [
        "graph_prompt_strategy",
        "graph_reserved_mem",
        "max_capture_tokens",
    ]
    assert idle(compile=True, graph_reserved_mem=0.2, **order) == ["graph_reserved_mem"]
    assert idle(device="hpu", graph_reserved_mem=0.2, **order) == []


def test_threads_and_allocators_are_of_those_who_compute_on_a_cpu() -> None:
    given: dict[str, Any] = {"device_threads": 2, "malloc": "system"}
    assert idle(device="cpu", **given) == []
    assert idle(device="sim", **given) == ["malloc"]
    assert idle(device="cuda", **given) == ["device_threads", "malloc"]
    assert idle(device="hpu", cpu_slice_us=0) == ["cpu_slice_us"]


def test_handing_on_is_for_engines_of_a_role() -> None:
    given: dict[str, Any] = {"kv_offer_share": 0.3, "max_kv_transfers": 2}
    assert idle(**given) == sorted(given)
    assert idle(role="prefill", **given) == []
