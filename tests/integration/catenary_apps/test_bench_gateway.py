"""The load tool against Catenary's own gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from catenary_apps.load import (
    Endpoint,
    LoadPlan,
    PlainWords,
    Target,
    TokenizerText,
    TokenRange,
    parse_lengths,
    random_conversations,
    run_load,
)
from tests.support.gateway import Stack
from tests.support.stack_fixtures import StartStack
from tests.support.tiny_tokenizer import write_tiny_model

ROUTES = [Endpoint.COMPLETIONS, Endpoint.CHAT]


async def test_ids_and_lengths_arrive_as_they_were_asked_for(start_stack: StartStack) -> None:
    stack: Stack = await start_stack()
    conversations = random_conversations(
        12,
        prompts=parse_lengths("uniform:20:60"),
        outputs=parse_lengths("ratio:16:0.5"),
        source=TokenRange(256, 500),
        prefix_tokens=16,
    )
    plan = LoadPlan(
        target=Target(base_url=stack.address, extra_body={"seed": 1}),
        conversations=conversations,
        max_concurrency=4,
        warmup=2,
        strict_lengths=True,
    )
    result = await run_load(plan)
    measured = [conversation.turns[0] for conversation in conversations[2:]]
    assert (result.completed, result.failures, result.wrong_lengths) == (10, {}, 0)
    assert result.input_tokens == sum(len(turn.prompt) for turn in measured)
    assert result.output_tokens == sum(turn.output_tokens or 0 for turn in measured)
    assert 2 <= result.peak_concurrency <= 4


@pytest.mark.parametrize("endpoint", ROUTES)
async def test_sessions_of_texts_work_on_both_routes(
    start_stack: StartStack, tmp_path: Path, endpoint: Endpoint
) -> None:
    stack: Stack = await start_stack()
    source = TokenizerText.load(write_tiny_model(tmp_path / "tiny"))
    conversations = random_conversations(
        3, prompts=parse_lengths("8"), outputs=parse_lengths("6"), source=source, turns=3
    )
    plan = LoadPlan(
        target=Target(base_url=f"{stack.address}/v1", endpoint=endpoint),
        conversations=conversations,
        strict_lengths=True,
    )
    result = await run_load(plan)
    assert (result.completed, result.failures, result.output_tokens) == (9, {}, 54)
    if endpoint is Endpoint.COMPLETIONS:
        firsts = [record.prompt_tokens for record in result.records if record.turn == 0]
        assert firsts == [8, 8, 8]


async def test_refusals_of_the_gateway_are_told(start_stack: StartStack) -> None:
    stack: Stack = await start_stack()
    conversations = random_conversations(
        2, prompts=parse_lengths("4"), outputs=parse_lengths("100000"), source=PlainWords()
    )
    plan = LoadPlan(target=Target(base_url=stack.address), conversations=conversations)
    result = await run_load(plan)
    assert result.failures == {"http_400": 2}
    assert "1024" in result.records[0].detail
