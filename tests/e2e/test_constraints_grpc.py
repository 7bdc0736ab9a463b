"""Constrained output of the real model, from a plain gRPC client through router and servicer to the core."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import pytest

from catenary.client import AsyncClient
from catenary.rpc import RpcError
from catenary.v1 import common_pb2
from tests.support.e2e_stack import ProcessStack

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

MODEL = "SmolLM2-135M-Instruct"
JSON = common_pb2.CONSTRAINT_KIND_JSON_SCHEMA
REGEX = common_pb2.CONSTRAINT_KIND_REGEX
GRAMMAR = common_pb2.CONSTRAINT_KIND_GRAMMAR
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "languages": {
            "type": "array",
            "items": {"enum": ["français", "日本語"]},
            "minItems": 1,
            "maxItems": 2,
        },
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}


def constraint(kind: common_pb2.ConstraintKind.ValueType, source: Any, **more: Any) -> common_pb2.Constraint:
    text = source if isinstance(source, str) else json.dumps(source)
    return common_pb2.Constraint(kind=kind, source=text, **more)


async def ask(client: AsyncClient, content: str, **options: Any) -> tuple[str, list[int], Any]:
    prompt = await client.render_chat([{"role": "user", "content": content}], model=MODEL)
    tokens: list[int] = []
    end = common_pb2.SequenceEnd()
    chosen = {"temperature": 0.0, "max_tokens": 120, **options}
    async for delta in client.generate(prompt, model=MODEL, **chosen):
        tokens += delta.token_ids
        if delta.HasField("end"):
            end = delta.end
    text = await client.detokenize(tokens, model=MODEL, skip_special_tokens=True)
    return text, tokens, end


@pytest.mark.long
async def test_constrained_answers_beside_free_ones(stack: ProcessStack) -> None:
    free = "Say hello."
    async with stack.client() as client:
        alone = await ask(client, free, max_tokens=24)
        schema = constraint(JSON, PERSON)
        words = constraint(REGEX, "(yes|no), [a-z ]{3,20}\\.")
        listed = constraint(GRAMMAR, 'start: item ("\\n" item){2}\nitem: "- " /[a-z]{3,8}/\n')
        answers = await asyncio.gather(
            ask(client, "Describe a person as JSON.", constraint=schema),
            ask(client, "Describe a person as JSON.", constraint=schema, temperature=1.0, seed=3),
            ask(client, free, max_tokens=24),
            ask(client, "Is the sky blue?", constraint=words, top_logprobs=2),
            ask(client, "Name three fruits.", constraint=listed, ignore_eos=True, min_tokens=100),
            ask(client, "Is it?", constraint=constraint(REGEX, "(yes|no)", after="e"), ignore_eos=True),
        )
    for text, _, end in answers[:2]:
        assert end.reason == common_pb2.FINISH_REASON_STOP
        jsonschema.validate(json.loads(text), PERSON)
        assert "\\u" not in text
    assert answers[2][:2] == alone[:2]
    assert re.fullmatch(r"(yes|no), [a-z ]{3,20}\.", answers[3][0])
    assert re.fullmatch(r"(- [a-z]{3,8}\n?){3}", answers[4][0])
    assert answers[4][2].reason == common_pb2.FINISH_REASON_STOP
    before, _, behind = answers[5][0].partition("e")
    assert "e" not in before
    assert behind in ("yes", "no")


@pytest.mark.long
async def test_a_resumed_answer_goes_on_alike(stack: ProcessStack) -> None:
    given = constraint(JSON, PERSON)
    async with stack.client() as client:
        question = "Describe a person as JSON."
        text, tokens, _ = await ask(client, question, constraint=given)
        prompt = await client.render_chat([{"role": "user", "content": question}], model=MODEL)
        half = len(tokens) // 2
        rest: list[int] = []
        async for delta in client.generate(
            [*prompt, *tokens[:half]],
            model=MODEL,
            prompt_len=len(prompt),
            temperature=0.0,
            max_tokens=120,
            constraint=given,
        ):
            rest += delta.token_ids
    assert tokens[:half] + rest == tokens
    jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize(
    "given",
    [
        constraint(REGEX, "["),
        constraint(JSON, {"type": "stsring"}),
        constraint(GRAMMAR, 'rout::="x"'),
        constraint(common_pb2.CONSTRAINT_KIND_STRUCTURAL_TAG, "{}"),
        constraint(common_pb2.CONSTRAINT_KIND_UNSPECIFIED, "a"),
        constraint(REGEX, ""),
        constraint(REGEX, "a", after=""),
    ],
)
async def test_a_bad_constraint_is_named(stack: ProcessStack, given: common_pb2.Constraint) -> None:
    async with stack.client() as client:
        try:
            _, tokens, end = await ask(client, "Hello.", constraint=given)
            error = end.error
            assert not tokens
        except RpcError as refusal:
            error = refusal.error
        assert error.code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
        assert error.param == "constraint"
        assert "\n" not in error.message
