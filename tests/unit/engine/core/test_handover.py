"""KV that moves from one core to another: the same tokens as one engine gives, and nothing computed twice."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from catenary.transfer import name_of
from services.engine.config import EngineConfig
from services.engine.core.errors import StartError
from services.engine.domain import FinishReason
from services.engine.model import weights_fingerprint
from tests.support.constrained import regex, save_constrained_model, text_of
from tests.support.handover import (
    LIMIT_S,
    HandoverCores,
    check_empty,
    computed,
    offer_of,
    run_both,
    transfers,
)
from tests.support.torch_engine import save_tiny_model

BLOCK = 8
PROMPT = [3 + at * 7 % 120 for at in range(61)]
OTHER = [5 + at * 11 % 120 for at in range(61)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def cores(model: Path, tmp_path: Path) -> Iterator[HandoverCores]:
    cores = HandoverCores(model, tmp_path / "kv")
    yield cores
    cores.close()


def alone(cores: HandoverCores, prompt: list[int], **options: Any) -> Any:
    """What a single engine makes of it."""
    core = cores.start("both")
    key = core.submit(prompt, **options)
    core.run()
    return core.outputs[key]


@pytest.mark.parametrize(
    ("connector", "length"),
    [
        ("shm", 2),
        ("shm", BLOCK + 1),
        ("tcp", BLOCK),
        ("tcp", 61),
        ("tests.support.kv_connectors:PluggedConnector", 61),
    ],
)
def test_tokens_and_log_probabilities_are_those_of_one_engine(
    cores: HandoverCores, connector: str, length: int
) -> None:
    prefill, decode = (cores.start(role, kv_connector=connector) for role in ("prefill", "decode"))
    prompt = PROMPT[:length]
    options: dict[str, Any] = {"temperature": 0.8, "seed": 7, "top_logprobs": 2}
    key = decode.submit(prompt, kv_offer=offer_of(prefill, prompt), **options)
    run_both(prefill, decode)
    found, wanted = decode.outputs[key], alone(cores, prompt, **options)
    assert found.token_ids == wanted.token_ids
    assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
    assert found.end is not None
    assert (found.end.transferred_tokens, found.end.cached_tokens) == (length - 1, 0)
    assert computed(decode) == 0
    assert (transfers(decode).arrived, transfers(decode).faults) == (1, {})
    assert (transfers(prefill).made, transfers(prefill).fetched) == (1, 1)
    check_empty(prefill, decode)


def test_a_prompt_alone_emits_nothing(cores: HandoverCores) -> None:
    prefill = cores.start("prefill")
    key = prefill.submit(PROMPT, prefill_only=True, top_logprobs=3, stop_token_ids=[4], max_tokens=9)
    prefill.run()
    output = prefill.outputs[key]
    assert output.end is not None
    assert (output.token_ids, output.logprobs, output.end.reason) == ([], [], FinishReason.STOP)
    assert (output.end.prompt_tokens, output.end.completion_tokens) == (len(PROMPT), 0)
    assert computed(prefill) == len(PROMPT) - 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_that_are_cached_here_are_not_fetched(cores: HandoverCores, dtype: str) -> None:
    prefill, decode = cores.start("prefill", dtype=dtype), cores.start("decode", dtype=dtype)
    first = decode.submit(PROMPT[:30], kv_offer=offer_of(prefill, PROMPT[:30]))
    run_both(prefill, decode)
    before = transfers(decode).bytes_received
    second = decode.submit(PROMPT, kv_offer=offer_of(prefill, PROMPT))
    run_both(prefill, decode)
    end = decode.outputs[second].end
    assert end is not None
    assert decode.outputs[first].end is not None
    cached = 29 // BLOCK * BLOCK
    assert (end.cached_tokens, end.transferred_tokens) == (cached, len(PROMPT) - 1 - cached)
    blocks = -(-(len(PROMPT) - 1) // BLOCK) - cached // BLOCK
    size = decode.engine.runner.copies.block_bytes
    assert transfers(decode).bytes_received - before == blocks * size
    # The third time all full blocks are there.
    third = decode.submit(PROMPT[:57], kv_offer=offer_of(prefill, PROMPT[:57]))
    run_both(prefill, decode)
    end = decode.outputs[third].end
    assert end is not None
    assert (end.cached_tokens, end.transferred_tokens) == (56, 0)
    assert computed(decode) == 0
    check_empty(prefill, decode)


def test_samples_of_one_prompt_fetch_it_once(cores: HandoverCores) -> None:
    prefill, decode = cores.start("prefill"), cores.start("decode")
    sampled = {"temperature": 0.9}
    lead = decode.submit(PROMPT, kv_offer=offer_of(prefill, PROMPT), seed=1, **sampled)
    others = [decode.submit(PROMPT, same_prompt_as=lead, seed=seed, **sampled) for seed in (2, 3)]
    run_both(prefill, decode)
    for key, seed in zip((lead, *others), (1, 2, 3), strict=True):
        assert decode.outputs[key].token_ids == alone(cores, PROMPT, seed=seed, **sampled).token_ids
    assert computed(decode) == 0
    assert transfers(decode).arrived == 1
    check_empty(prefill, decode)


def test_what_waits_for_a_leader_goes_on_without_it(cores: HandoverCores) -> None:
    prefill, decode = cores.start("prefill"), cores.start("decode")
    lead = decode.submit(PROMPT, kv_offer=offer_of(prefill, PROMPT))
    kept, gone = (decode.submit(PROMPT, same_prompt_as=lead) for _ in range(2))
    for key in (gone, lead):
        decode.abort(key)
    decode.run()
    assert decode.outputs[kept].token_ids == alone(cores, PROMPT).token_ids
    for key in (gone, lead):
        end = decode.outputs[key].end
        assert end is not None
        assert end.reason is FinishReason.ABORT
    check_empty(decode)


def test_grammars_hold_as_in_one_engine(tmp_path: Path) -> None:
    cores = HandoverCores(save_constrained_model(tmp_path / "model"), tmp_path / "kv")
    prefill, decode, single = (cores.start(role) for role in ("prefill", "decode", "both"))
    prompt = [value % 90 + 3 for value in range(40)]
    options: dict[str, Any] = {"constraint": regex("[a-f]{20}"), "temperature": 1.0, "max_tokens": 40}
    key = decode.submit(prompt, kv_offer=offer_of(prefill, prompt, **options), **options)
    run_both(prefill, decode)
    other = single.submit(prompt, **options)
    single.run()
    assert decode.outputs[key].token_ids == single.outputs[other].token_ids
    assert re.fullmatch("[a-f]{20}", text_of(decode, decode.outputs[key]))
    assert computed(decode) == 0
    check_empty(prefill, decode)
    cores.close()


@pytest.mark.advisory("CVE-2026-105757")
def test_a_constraint_that_fails_leaves_no_blocks(tmp_path: Path) -> None:
    cores = HandoverCores(save_constrained_model(tmp_path / "model"), tmp_path / "kv")
    prefill, decode = cores.start("prefill"), cores.start("decode")
    prompt = [value % 90 + 3 for value in range(40)]
    key = decode.submit(prompt, kv_offer=offer_of(prefill, prompt), constraint=regex("[a-f"))
    run_both(prefill, decode)
    end = decode.outputs[key].end
    assert end is not None
    assert end.reason is FinishReason.ERROR
    assert transfers(decode).bytes_received > 0
    check_empty(prefill, decode)
    cores.close()


def retrained(model: Path, directory: Path) -> Path:
    """The model with one tensor that is a little different."""
    shutil.copytree(model, directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    name = max(tensors)
    tensors[name] = tensors[name] + 1e-3 * torch.randn(tensors[name].shape)
    save_file(tensors, file, {"format": "pt"})
    return directory


def test_kv_of_other_weights_is_not_taken(cores: HandoverCores, model: Path, tmp_path: Path) -> None:
    others = HandoverCores(retrained(model, tmp_path / "tuned"), cores.directory)
    prefill, decode = others.start("prefill"), cores.start("decode")
    key = decode.submit(PROMPT, kv_offer=offer_of(prefill, PROMPT))
    decode.run()
    assert decode.outputs[key].token_ids == alone(cores, PROMPT).token_ids
    assert transfers(decode).faults == {"layout": 1}
    others.close()


def test_weights_are_the_same_however_they_lie_in_files(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[1::2], "b.safetensors": names[::2]}
    for file, some in parts.items():
        save_file({name: tensors[name] for name in some}, tmp_path / file)
    index = {"weight_map": {name: file for file, some in parts.items() for name in some}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_fingerprint(tmp_path) == weights_fingerprint(model)
    assert weights_fingerprint(retrained(model, tmp_path / "tuned")) != weights_fingerprint(model)


def test_offers_expire_and_are_withdrawn(cores: HandoverCores) -> None:
    prefill = cores.start("prefill", kv_offer_ttl_s=0.05)
    offer_of(prefill, PROMPT)
    deadline = time.monotonic() + LIMIT_S
    while prefill.engine.scheduler.transfer_blocks.tables():
        assert time.monotonic() < deadline
        prefill.turn()
    assert transfers(prefill).expired == 1
    slow = cores.start("prefill", kv_offer_ttl_s=600.0)
    key = slow.submit(PROMPT, prefill_only=True)
    slow.run()
    assert slow.engine.scheduler.load().used_blocks > 0
    slow.abort(key)
    slow.turn()
    assert transfers(slow).withdrawn == 1
    check_empty(prefill, slow)


def test_an_offer_that_is_read_neither_expires_nor_gives_way(cores: HandoverCores) -> None:
    small = {"kv_cache_gib": 40 * block_bytes(cores) / 2**30, "max_model_len": 200}
    prefill = cores.start("prefill", kv_offer_share=0.4, kv_offer_ttl_s=600.0, **small)
    book: Any = prefill.engine.handover.offers
    read = book.find(name_of(offer_of(prefill, PROMPT).ticket))
    with book.reading(read):
        for prompt in (OTHER, PROMPT[::-1], OTHER[::-1]):
            offer_of(prefill, prompt)
        assert transfers(prefill).evicted > 0
        late = time.monotonic() + 601
        book.clock = lambda: late
        prefill.turn()
        assert (transfers(prefill).offers, book.patience()) == (1, None)
        assert book.find(name_of(read.ticket)) is read
    prefill.turn()
    assert transfers(prefill).offers == 0
    check_empty(prefill)


def test_a_busy_engine_gives_many_chunks_between_two_steps(cores: HandoverCores) -> None:
    prefill, decode = cores.start("prefill"), cores.start("decode")
    for core in (prefill, decode):
        core.engine.runner.copies.blocks = 1
    key = decode.submit(PROMPT, kv_offer=offer_of(prefill, PROMPT))
    book: Any = prefill.engine.handover.offers
    deadline = time.monotonic() + LIMIT_S
    while len(book.reads) < 8:
        assert time.monotonic() < deadline
    prefill.turn()
    while decode.loop.work.busy:
        assert time.monotonic() < deadline
        decode.turn()
    assert decode.outputs[key].token_ids == alone(cores, PROMPT).token_ids
    assert computed(decode) == 0


def test_offers_hold_their_share_and_give_way_to_sequences(cores: HandoverCores) -> None:
    blocks = 40
    small = {"kv_cache_gib": blocks * block_bytes(cores) / 2**30, "max_model_len": 200}
    prefill = cores.start("prefill", kv_offer_share=0.5, **small)
    total = prefill.engine.ready.capacity.total_blocks
    held = [offer_of(prefill, prompt) for prompt in (PROMPT, OTHER, PROMPT[::-1], OTHER[::-1])]
    prefill.turn()
    load = transfers(prefill)
    assert (load.made, load.evicted) == (4, 4 - load.offers)
    assert load.blocks <= total // 2
    assert sum(offer.blocks for offer in held) > total // 2
    # Whoever runs needs nearly all.
    prompt = [7 + at * 13 % 110 for at in range(8 * (total - 3))][:190]
    key = prefill.submit(prompt, max_tokens=8)
    others = [prefill.submit([9, *prompt[:150]], max_tokens=8), prefill.submit(OTHER[:40], max_tokens=8)]
    prefill.run()
    assert all(len(prefill.outputs[one].token_ids) == 8 for one in (key, *others))
    assert transfers(prefill).offers < load.offers
    prefill.engine.scheduler.check()


def block_bytes(cores: HandoverCores) -> int:
    """What one block of the model takes."""
    return cores.start("both").engine.runner.copies.block_bytes


def test_a_connector_that_cannot_be_had_ends_the_start(cores: HandoverCores, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"kv_connector": "carrier-pigeon"}, "carrier-pigeon"),
        ({"kv_connector": "tests.support.kv_connectors:Nothing"}, "Nothing"),
        ({"kv_connector": "tests.support.handover:HandoverCores"}, "not a Connector"),
        ({"kv_transfer_directory": str(tmp_path / "file")}, "shm"),
        ({"kv_connector": "tcp", "kv_transfer_listen": "192.0.2.1:1"}, "tcp"),
    ]
    for options, word in cases:
        with pytest.raises(StartError, match=word):
            cores.start("prefill", **options)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_contiguous_kv_excludes_roles(role: str) -> None:
    with pytest.raises(ValueError, match=f"role {role} hands on"):
        EngineConfig(role=role, contiguous_kv=True, enable_prefix_caching=False)
    EngineConfig(role="decode", kv_transfer_timeout_s=60.0, stall_limit_s=62.0)
    with pytest.raises(ValueError, match=r"kv_transfer_timeout_s \(60\) must be 2 s below stall_limit_s"):
        EngineConfig(role="decode", kv_transfer_timeout_s=60.0)
    everywhere: dict[str, Any] = {"role": "prefill", "kv_connector": "tcp", "kv_transfer_listen": "0.0.0.0:0"}
    EngineConfig(**everywhere, kv_transfer_advertise="host:0")
    with pytest.raises(ValueError, match="kv_transfer_advertise"):
        EngineConfig(**everywhere)
    for field in ("kv_transfer_listen", "kv_transfer_advertise"):
        socket: dict[str, Any] = {field: "unix:/tmp/socket"}
        with pytest.raises(ValueError, match="HOST:PORT"):
            EngineConfig(**socket)


def test_prompts_that_cannot_be_handed_over_are_refused(cores: HandoverCores) -> None:
    prefill = cores.start("prefill")
    for tokens, options in (([5], {}), (PROMPT, {"prompt_len": 30})):
        key = prefill.submit(tokens, prefill_only=True, **options)
        prefill.turn()
        end = prefill.outputs[key].end
        assert end is not None
        assert end.reason is FinishReason.ERROR
    check_empty(prefill)
