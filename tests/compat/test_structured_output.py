"""Users' bug reports, section D: structured output. And C67 of section G."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from catenary.constraints import ConstraintKind
from services.engine.domain import ConstraintOptions
from tests.support.constrained import ended, save_constrained_model, schema, text_of
from tests.support.gateway import Stack
from tests.support.tiny_tokenizer import byte_ids
from tests.support.torch_engine import LocalCore, tiny_options

MOOD = {
    "type": "object",
    "properties": {"心情": {"enum": ["开心", "难过"]}},
    "required": ["心情"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_constrained_model(tmp_path_factory.mktemp("constrained"))


def answers(core: LocalCore, constraint: ConstraintOptions, runs: list[dict[str, Any]]) -> list[str]:
    """What the model says, however it is sampled; each ends by itself."""
    options = {"max_tokens": 250, "ignore_eos": False}
    keys = [core.submit(byte_ids("x"), constraint=constraint, **{**options, **run}) for run in runs]
    core.run(4000)
    assert {ended(core.outputs[key]) for key in keys} == {"stop"}
    return [text_of(core, core.outputs[key]) for key in keys]


def test_c36_text_that_is_not_ascii_is_written_as_it_is(directory: Path) -> None:
    runs = [
        {"temperature": 1.0, "seed": seed, "logit_bias": ((byte_ids(" ")[0], -80.0),)} for seed in range(6)
    ]
    found = answers(LocalCore(tiny_options(directory)), schema(MOOD), runs)
    for text in found:
        assert "\\" not in text
        assert json.loads(text)["心情"] in ("开心", "难过")


def test_c37_white_space_ends(directory: Path) -> None:
    """The model prefers it by far."""
    wanted = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["a"],
        "additionalProperties": False,
    }
    runs = [
        {"logit_bias": tuple((byte_ids(char)[0], 90.0) for char in chars)} for chars in ("\n", " ", "\n \t")
    ]
    for text in answers(LocalCore(tiny_options(directory)), schema(wanted), runs):
        assert 0 <= json.loads(text)["a"] <= 9
        assert 30 <= max(map(len, re.findall(r"\s+", text))) <= 32


async def test_c38_a_bad_grammar_is_refused(stack: Stack) -> None:
    for grammar in ('rout::="x"', "root ::= x", "root := 5"):
        answer = await stack.complete("x", structured_outputs={"grammar": grammar})
        assert (answer.status, answer.json()["error"]["param"]) == (400, "structured_outputs.grammar")
    await stack.alive()


def test_c67_choices_of_a_model_in_bfloat16(directory: Path) -> None:
    core = LocalCore(tiny_options(directory, dtype="bfloat16"))
    choice = ConstraintOptions(ConstraintKind.GRAMMAR, 'start: "yes" | "no"')
    runs = [{"temperature": temperature, "seed": seed} for temperature in (0.0, 1.0, 5.0) for seed in (1, 2)]
    assert set(answers(core, choice, runs)) <= {"yes", "no"}
