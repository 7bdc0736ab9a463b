"""xgrammar in place of llguidance: what it takes it honours, and the rest is refused by name."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from catenary.constraints import ConstraintKind
from services.engine.core.errors import StartError
from services.engine.domain import ConstraintOptions
from tests.support.constrained import SCHEMA, ended, regex, save_constrained_model, schema, text_of
from tests.support.tiny_tokenizer import EOS_ID, byte_ids
from tests.support.torch_engine import LocalCore, tiny_options

NAMES = "(anna|otto|eve)( [a-z]{1,4}){2}"
HONOURED: list[dict[str, Any]] = [
    SCHEMA,
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": ["null", "integer"], "minimum": -5, "exclusiveMaximum": 90},
    {"anyOf": [{"const": {"a": [1]}}, {"enum": ["x", 2, None]}]},
    {"type": "string", "pattern": "^[a-c]{2,5}$", "title": "T", "x-ours": 1, "example": "abc"},
    {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/node"}},
        "required": ["next"],
        "additionalProperties": False,
        "$defs": {"node": {"type": "array", "prefixItems": [{"type": "null"}], "items": False}},
    },
]
REFUSED: list[dict[str, Any]] = [
    {"type": "integer", "multipleOf": 3},
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    {"type": "object", "minProperties": 2},
    {"type": "string", "format": "date"},
    {"type": "string", "pattern": "^a+$", "maxLength": 3},
    {"allOf": [{"type": "integer"}, {"minimum": 3}]},
    {"enum": [1, "a"], "type": "string"},
    {"type": "object", "properties": {"a": {"not": {}}}},
    {"minimum": 3},
    {"type": "object", "required": ["a"]},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_constrained_model(tmp_path_factory.mktemp("constrained"))


@pytest.fixture(scope="module")
def core(directory: Path) -> LocalCore:
    return LocalCore(tiny_options(directory, grammar_backend="xgrammar"))


@pytest.mark.parametrize("value", HONOURED)
def test_schemas_that_it_takes_are_honoured(core: LocalCore, value: dict[str, Any]) -> None:
    options: dict[str, Any] = {"constraint": schema(value), "temperature": 1.5, "max_tokens": 150}
    keys = [core.submit(byte_ids("j"), seed=seed, ignore_eos=bool(seed % 2), **options) for seed in range(8)]
    core.run()
    stopped = 0
    for key in keys:
        if ended(core.outputs[key]) == "length":
            continue
        assert ended(core.outputs[key]) == "stop"
        jsonschema.validate(json.loads(text_of(core, core.outputs[key])), value)
        stopped += 1
    assert stopped > 2


@pytest.mark.parametrize("value", REFUSED)
def test_what_it_would_pass_over_is_refused(core: LocalCore, value: dict[str, Any]) -> None:
    key = core.submit(byte_ids("j"), constraint=schema(value))
    core.run()
    assert ended(core.outputs[key]) == "error:constraint"


def test_other_kinds_of_constraints(core: LocalCore) -> None:
    tag = {
        "triggers": ["<f"],
        "structures": [{"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}],
        "at_least_one": True,
        "stop_after_first": True,
    }
    cases = {
        r"(anna|otto|eve)( [a-z]{1,4}){2}": regex(NAMES),
        r"[0-9]{2}(,[0-9]{2}){2}": ConstraintOptions(
            ConstraintKind.GRAMMAR, 'start: item ("," item){2}\nitem: /[0-9]{2}/\n'
        ),
        r"x+y": ConstraintOptions(ConstraintKind.GBNF, 'root ::= "x" rest\nrest ::= "y" | "x" rest\n'),
        r"<f>\s*(true|false)\s*</f>": ConstraintOptions(ConstraintKind.STRUCTURAL_TAG, json.dumps(tag)),
    }
    for pattern, constraint in cases.items():
        for options in ({"ignore_eos": True}, {"min_tokens": 50, "ignore_eos": False}):
            key = core.submit(
                byte_ids("k"), constraint=constraint, temperature=1.0, max_tokens=120, **options
            )
            core.run()
            output = core.outputs[key]
            assert ended(output) == "stop"
            assert output.token_ids[-1] == EOS_ID
            assert re.fullmatch(pattern, text_of(core, output))
    bad = ("[", "(?<=a)b")
    keys = [core.submit(byte_ids("k"), constraint=regex(source)) for source in bad]
    core.run()
    assert [ended(core.outputs[key]) for key in keys] == ["error:constraint"] * 2


def test_markers_stop_ids_and_resumed_sequences(core: LocalCore) -> None:
    prompt = byte_ids("m")
    options: dict[str, Any] = {
        "constraint": regex("[0-9]{6}b{3}", "e"),
        "temperature": 1.0,
        "logit_bias": ((byte_ids("e")[0], 6.0),),
        "max_tokens": 60,
        "min_tokens": 40,
        "stop_token_ids": byte_ids("b"),
    }
    key = core.submit(prompt, **options)
    core.run()
    whole = core.outputs[key]
    assert ended(whole) == "stop"
    assert re.fullmatch("[^e]*e[0-9]{6}bbb", text_of(core, whole))
    again = core.submit([*prompt, *whole.token_ids[:-4]], prompt_len=len(prompt), **options)
    core.run()
    assert whole.token_ids[:-4] + core.outputs[again].token_ids == whole.token_ids


def test_a_start_without_the_package_says_which(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(StartError, match="xgrammar"):
        LocalCore(tiny_options(directory, grammar_backend="xgrammar"))
