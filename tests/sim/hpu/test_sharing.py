"""Samples that share a prompt, and beams, on a simulated HPU: as on the CPU, and nothing is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from services.engine.device import ExecutionMode, sim
from services.engine.domain import BeamOptions
from tests.support.sim_cores import SimCores, work_of
from tests.support.sim_device import Host
from tests.support.torch_engine import LocalCore, save_tiny_model

PROMPT = [3 + at * 7 % 120 for at in range(37)]
STOPS = list(range(0, 120, 7))


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimCores]:
    directory = tmp_path_factory.mktemp("host")
    model = save_tiny_model("llama", tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch:
        yield SimCores(Host(patch, directory), model, directory)
        sim.card().release()


def serve(core: LocalCore) -> list[Any]:
    """Two searches and three samples of one prompt: what each came to."""
    keys = [
        core.submit(PROMPT[:20], beams=BeamOptions(3, results=3), stop_token_ids=STOPS, max_tokens=14),
        core.submit(PROMPT[:5], beams=BeamOptions(2, 0.5, True, 2), repetition_penalty=1.2, max_tokens=6),
    ]
    lead = core.submit(PROMPT, max_tokens=8)
    keys += [lead, *(core.submit(PROMPT, seed=n, temperature=0.8, same_prompt_as=lead) for n in (1, 2))]
    core.run()
    found = []
    for key in keys:
        output = core.outputs[key]
        assert output.end is not None
        found.append((output.token_ids, [one.token_ids for one in output.end.hypotheses]))
    return found


@pytest.mark.parametrize("mode", [ExecutionMode.GRAPH, ExecutionMode.LAZY])
def test_shared_prompts_and_beams_answer_as_on_the_cpu(cores: SimCores, mode: ExecutionMode) -> None:
    core = cores.start(mode)
    warm = work_of(core)
    found = serve(core)
    assert work_of(core) == warm
    assert found == serve(cores.cpu())
