"""Log probabilities of prompt tokens over gRPC: the plain client, a session, two sequences in one step."""

from __future__ import annotations

import asyncio

from catenary.client import AsyncClient
from catenary_testing.engine import Script, ScriptedCapacity, best_alternatives, sampled_logprob
from tests.support.fleet import Fleet
from tests.support.specs import expected_tokens, sequence_spec

PROMPT = list(range(40, 60))


def client_of(fleet: Fleet) -> AsyncClient:
    return AsyncClient(fleet.router_address, secret=fleet.secrets.client)


async def test_the_client_gets_them_with_the_first_token(start_fleet):
    # Four steps for the prompt.
    fleet = await start_fleet(script=Script(capacity=ScriptedCapacity(max_batched_tokens=6)))
    async with client_of(fleet) as client:
        stream = client.generate(PROMPT, model="scripted", prompt_logprobs=3, max_tokens=4, seed=7)
        deltas = [delta async for delta in stream]
    columns = deltas[0].prompt_logprobs
    positions = range(1, len(PROMPT))
    assert (list(columns.rows), list(columns.counts)) == ([0], [len(PROMPT) - 1])
    assert list(columns.logprobs) == [sampled_logprob(PROMPT[at], at) for at in positions]
    assert list(columns.top_counts) == [3] * len(positions)
    best = [pair for at in positions for pair in best_alternatives(PROMPT[at], at, 3, 32_000)]
    assert list(zip(columns.top_ids, columns.top_logprobs, strict=True)) == best
    assert not any(delta.HasField("prompt_logprobs") for delta in deltas[1:])
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert tokens == expected_tokens(PROMPT, 4)


async def test_only_who_asks_gets_them(start_fleet):
    fleet = await start_fleet()
    spec = sequence_spec(PROMPT, prompt_logprobs=0, top_logprobs=1, max_tokens=3)
    calls = [fleet.generate(spec), fleet.generate(sequence_spec(PROMPT, max_tokens=3))]
    asked, plain = await asyncio.gather(*[_read(call) for call in calls])
    assert sum(len(delta.prompt_logprobs.logprobs) for delta in asked) == len(PROMPT) - 1
    assert not any(delta.prompt_logprobs.top_ids for delta in asked)
    assert sum(len(delta.logprobs.sampled) for delta in asked) == 3
    assert not any(delta.HasField("prompt_logprobs") for delta in plain)


async def test_a_prompt_of_one_token_has_none(start_fleet):
    fleet = await start_fleet()
    deltas = await _read(fleet.generate(sequence_spec([5], prompt_logprobs=2, max_tokens=2)))
    assert not any(delta.HasField("prompt_logprobs") for delta in deltas)
    assert [token for delta in deltas for token in delta.token_ids] == expected_tokens([5], 2)


async def _read(call):
    return [delta async for delta in call]
