"""Constraints that were no check of the tokenizer service's: the engine refuses them, or they do no harm."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from catenary.constraints import ConstraintKind
from services.engine.domain import ConstraintOptions
from tests.support.constrained import ended, regex, save_constrained_model, text_of
from tests.support.tiny_tokenizer import byte_ids
from tests.support.torch_engine import LocalCore, tiny_options

WAIT_S = 120.0


def json_of(source: str) -> ConstraintOptions:
    return ConstraintOptions(ConstraintKind.JSON_SCHEMA, source)


def grammar(source: str) -> ConstraintOptions:
    return ConstraintOptions(ConstraintKind.GRAMMAR, source)


def gbnf(source: str) -> ConstraintOptions:
    return ConstraintOptions(ConstraintKind.GBNF, source)


def nested(depth: int) -> str:
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


REFUSED = {
    "an invalid type": json_of('{"properties":{"a":{"type":"stsring"}}}'),
    "an empty schema text": json_of(""),
    "no object": json_of("3"),
    "a regex without an end": regex("["),
    "look-behind": regex("(?<=a)b"),
    "a back reference": regex("(a)\\1"),
    "a count of 99999": regex("a{99999}"),
    "nested counts": regex("(a{1,1000}){1,1000}"),
    "counts of anything": regex("(.*){1,30000}"),
    "30000 parentheses": regex("(" * 30_000 + "a"),
    "matched parentheses": regex("(" * 30_000 + "a" + ")" * 30_000),
    "a grammar of nothing": grammar(""),
    "a rule that is itself": gbnf("root ::= root"),
    "rules in a circle": gbnf("root ::= a\na ::= root"),
    "no root": gbnf('rout::="x"'),
    "5000 schemas deep": json_of(nested(5000)),
    "100000 brackets": json_of("[" * 100_000),
    "a megabyte": regex("a" * 2**20),
    "20000 values": json_of(json.dumps({"enum": [f"value{i}" for i in range(20_000)]})),
    "a reference to itself": json_of('{"$ref": "#"}'),
    "tags of nothing": ConstraintOptions(ConstraintKind.STRUCTURAL_TAG, '{"triggers":[],"structures":[]}'),
}
HARMLESS = {
    "(a|a)*b": regex("(a|a)*b"),
    "(a+)+b": regex("(a+)+b"),
    "(x+x+)+y": regex("(x+x+)+y"),
    "left recursion": grammar('start: e\ne: e "+" t | t\nt: "1"\n'),
}


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> LocalCore:
    directory = save_constrained_model(tmp_path_factory.mktemp("constrained"))
    return LocalCore(tiny_options(directory, max_model_len=128))


def beside(core: LocalCore, constraint: ConstraintOptions | None) -> tuple[Any, list[int]]:
    """A sequence with this constraint, and the tokens of another, free one."""
    key = None
    if constraint is not None:
        key = core.submit(byte_ids("h"), constraint=constraint, max_tokens=60, temperature=1.0)
    free = core.submit(byte_ids("n"), max_tokens=20)
    deadline = time.monotonic() + WAIT_S
    while core.loop.work.busy:
        assert time.monotonic() < deadline
        core.turn()
    return None if key is None else core.outputs[key], core.outputs[free].token_ids


def test_it_is_refused_and_a_neighbour_goes_on(core: LocalCore) -> None:
    _, expected = beside(core, None)
    for name, constraint in REFUSED.items():
        key = core.submit(byte_ids("h"), constraint=constraint)
        while core.loop.work.busy:
            core.turn()
        assert ended(core.outputs[key]) == "error:constraint", name
        output, tokens = beside(core, constraint)
        message = str(output.end.error_message)
        assert "\n" not in message
        assert len(message) < 200
        assert tokens == expected, name


@pytest.mark.parametrize("name", HARMLESS)
def test_it_does_no_harm(core: LocalCore, name: str) -> None:
    _, expected = beside(core, None)
    output, tokens = beside(core, HARMLESS[name])
    assert ended(output) in ("stop", "length")
    assert tokens == expected
    if ended(output) == "stop" and HARMLESS[name].kind is ConstraintKind.REGEX:
        assert re.fullmatch(name, text_of(core, output))
