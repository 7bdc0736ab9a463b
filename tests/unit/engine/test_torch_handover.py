"""KV that moves from one core to another: the same tokens as one engine gives, and nothing computed twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.engine.link import FinishReason, OfferedKv
from tests.support.torch_engine import LocalCore, save_tiny_model, tiny_options

PROMPT = [3 + at * 7 % 120 for at in range(61)]
BLOCK = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def cores(model: Path, tmp_path: Path) -> Iterator[Callable[..., LocalCore]]:
    made: list[LocalCore] = []

    def start(role: str, **options: Any) -> LocalCore:
        values = {"kv_transfer_directory": str(tmp_path / "kv"), "kv_transfer_timeout_s": 5.0, **options}
        made.append(LocalCore(tiny_options(model, role=role, **values)))
        return made[-1]

    yield start
    for core in made:
        core.engine.close()


def offer_of(core: LocalCore, prompt: list[int], **options: Any) -> OfferedKv:
    """Computes a prompt, and returns the offer of its KV."""
    key = core.submit(prompt, prefill_only=True, **options)
    core.run()
    end = core.outputs[key].end
    assert end is not None
    assert end.reason is FinishReason.STOP
    assert core.outputs[key].token_ids == []
    assert end.prompt_tokens == len(prompt)
    assert end.completion_tokens == 0
    assert end.kv_offer is not None
    return end.kv_offer


def run_both(prefill: LocalCore, decode: LocalCore, limit_s: float = 20.0) -> None:
    """Turns both loops until the second has nothing left and the first holds no offer."""
    deadline = time.monotonic() + limit_s
    while decode.loop.busy or prefill.engine.scheduler.kept.tables():
        assert time.monotonic() < deadline
        prefill.turn()
        decode.turn()


def computed(core: LocalCore) -> int:
    """Tokens that prefill forwards have computed."""
    return core.engine.graphs.padding.prefill.tokens


def transfers(core: LocalCore) -> Any:
    return core.engine.handover.load()


@pytest.mark.parametrize("connector", ["shm", "tcp"])
@pytest.mark.parametrize("length", [2, BLOCK, BLOCK + 1, 61])
def test_tokens_are_those_of_one_engine(cores: Callable[..., LocalCore], connector: str, length: int) -> None:
    prefill, decode, alone = cores("prefill", kv_connector=connector), cores("decode"), cores("both")
    prompt = PROMPT[:length]
    options: dict[str, Any] = {"temperature": 0.8, "seed": 7, "top_logprobs": 2}
    key = decode.submit(prompt, kv_offer=offer_of(prefill, prompt), **options)
    run_both(prefill, decode)
    expected = alone.submit(prompt, **options)
    alone.run()
    found, wanted = decode.outputs[key], alone.outputs[expected]
    assert found.token_ids == wanted.token_ids
    assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
    assert found.end is not None
    assert (found.end.transferred_tokens, found.end.cached_tokens) == (length - 1, 0)
    assert computed(decode) == 0
    load = transfers(decode)
    assert (load.arrived, load.faults) == (1, {})
    assert transfers(prefill).fetched == 1
    for core in (prefill, decode):
        core.engine.scheduler.check()
        assert core.engine.scheduler.load().used_blocks == 0
