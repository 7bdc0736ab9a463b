"""KV that goes from and to a simulated HPU: the tokens are a CPU's, and nothing is compiled for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.engine.device import ExecutionMode, sim
from tests.support.sim_cores import SimCores, answer, whole, work_of
from tests.support.sim_device import Host
from tests.support.torch_engine import LocalCore, save_tiny_model

PROMPT = [3 + at * 7 % 120 for at in range(70)]


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimCores]:
    directory = tmp_path_factory.mktemp("host")
    model = save_tiny_model("llama", tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch:
        yield SimCores(Host(patch, directory), model, directory)
        sim.card().release()


def hand_over(prefill: LocalCore, decode: LocalCore) -> list[int]:
    """Computes the prompt in one core and goes on in the other."""
    first = prefill.submit(PROMPT, prefill_only=True)
    prefill.run()
    end = prefill.outputs[first].end
    assert end is not None
    key = decode.submit(PROMPT, kv_offer=end.kv_offer, max_tokens=12)
    deadline = time.monotonic() + 20
    while decode.loop.work.busy or prefill.engine.scheduler.transfer_blocks.tables():
        assert time.monotonic() < deadline
        prefill.turn()
        decode.turn()
    output = whole(decode.outputs[key])
    assert output.end is not None
    assert output.end.transferred_tokens == len(PROMPT) - 1
    assert decode.engine.graphs.padding.prefill.tokens == 0
    return output.token_ids


@pytest.mark.parametrize(
    ("mode", "role"),
    [(ExecutionMode.GRAPH, "prefill"), (ExecutionMode.GRAPH, "decode"), (ExecutionMode.LAZY, "decode")],
)
def test_kv_moves_without_a_compilation(
    cores: SimCores, mode: ExecutionMode, role: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"kv_transfer_directory": str(tmp_path)}
    card = cores.start(mode, role=role, **options)
    host = cores.cpu(role="decode" if role == "prefill" else "prefill", **options)
    warm = work_of(card)
    found = hand_over(card, host) if role == "prefill" else hand_over(host, card)
    assert work_of(card) == warm
    assert found == answer(cores.cpu(), PROMPT, 12)
    card.engine.handover.close()
    host.engine.handover.close()
