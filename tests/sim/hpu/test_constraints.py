"""Constrained output on a simulated HPU: as on the CPU, in all four modes, and nothing compiles meanwhile."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from services.engine.device import ExecutionMode, sim
from tests.support.constrained import SCHEMA, ended, regex, save_constrained_model, schema, text_of
from tests.support.sim_cores import SimCores, work_of
from tests.support.sim_device import Host
from tests.support.tiny_tokenizer import byte_ids
from tests.support.torch_engine import LocalCore

pytestmark = pytest.mark.timeout(600)

NAMES = "(anna|otto|eve)( [a-z]{1,4}){2}"
SORTS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_p": 0.9, "top_logprobs": 2},
    {"presence_penalty": 1.0, "repetition_penalty": 1.2, "min_tokens": 30},
    {"allowed_token_ids": tuple(byte_ids('abcdefghijklmnoptuv \n{}":,0123456789')), "bad_words": ((300,),)},
]


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimCores]:
    directory = tmp_path_factory.mktemp("host")
    model = save_constrained_model(tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch:
        yield SimCores(Host(patch, directory), model, directory)
        sim.card().release()


def serve(core: LocalCore) -> list[tuple[list[int], str]]:
    """Constrained sequences of all sorts, with others among them and chunks of prompts between."""
    keys = []
    for index, options in enumerate(SORTS):
        prompt = byte_ids("p" * (1 + 9 * index))
        constraint = regex(NAMES) if index % 2 == 0 else regex("[a-z ]{30}", None)
        keys.append(
            core.submit(prompt, constraint=constraint, seed=index, ignore_eos=False, max_tokens=40, **options)
        )
        keys.append(core.submit(prompt, seed=index, **options))
        core.turn()
    keys.append(core.submit(byte_ids("json"), constraint=schema(SCHEMA), max_tokens=80))
    core.run()
    return [(core.outputs[key].token_ids, ended(core.outputs[key])) for key in keys]


# A start visits all shapes, and dynamo takes its time.
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=[] if mode is ExecutionMode.GRAPH else pytest.mark.long, id=mode.value)
        for mode in ExecutionMode
    ],
)
def test_constrained_as_on_the_cpu(cores: SimCores, mode: ExecutionMode) -> None:
    expected = serve(cores.cpu())
    core = cores.start(mode)
    warm = work_of(core)
    found = serve(core)
    assert work_of(core) == warm
    assert core.engine.graphs.first_seen == 0
    # What is drawn may differ where float32 adds up otherwise; what is best may not.
    assert [end for _, end in found] == [end for _, end in expected]
    assert found[0] == expected[0]
    assert core.link.sent[-1].load.constraints.masks > 10
    for key in (1, 5):
        assert re.fullmatch(NAMES, text_of(core, core.outputs[key]))
    core.engine.close()


def test_c67_a_choice_with_logits_of_bfloat16(cores: SimCores) -> None:
    core = cores.start(dtype="bfloat16")
    free = core.submit(byte_ids("q"), max_tokens=8)
    keys = [core.submit(byte_ids("q"), constraint=regex("(yes|no)"), temperature=t) for t in (0.0, 1.0)]
    core.run()
    assert [text_of(core, core.outputs[key]) in ("yes", "no") for key in keys] == [True, True]
    assert ended(core.outputs[free]) == "length"
    again = core.submit(byte_ids("j"), constraint=schema(SCHEMA), temperature=1.0, max_tokens=80)
    core.run()
    if ended(core.outputs[again]) == "stop":
        jsonschema.validate(json.loads(text_of(core, core.outputs[again])), SCHEMA)
    core.engine.close()
