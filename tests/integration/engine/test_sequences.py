"""Sequences through a scripted engine: the real servicer, gRPC and a router that the test plays."""

from __future__ import annotations

import pytest

from catenary.v1 import common_pb2
from catenary_testing.engine import (
    Match,
    Rule,
    Script,
    ScriptedCapacity,
    ScriptedModel,
    Then,
    sampled_logprob,
)
from tests.support.specs import expected_tokens, sequence_spec
from tests.support.waiting import eventually

PROMPT = [11, 12, 13]


async def test_tokens_are_the_documented_hash_and_usage_is_exact(fake_router, start_engine):
    await start_engine()
    router = await fake_router.attached()
    await router.submit(1, sequence_spec(PROMPT, max_tokens=20))
    end = await router.end_of(1)
    assert router.tokens[1] == expected_tokens(PROMPT, 20)
    assert end.reason == common_pb2.FINISH_REASON_LENGTH
    assert (end.usage.prompt_tokens, end.usage.cached_tokens, end.usage.completion_tokens) == (3, 0, 20)
    assert not end.HasField("stop_token_id")
    assert not end.HasField("error")


async def test_a_sequence_submitted_with_its_emitted_tokens_goes_on_alike(fake_router, start_engine):
    await start_engine()
    router = await fake_router.attached()
    whole = expected_tokens(PROMPT, 20)
    await router.submit(1, sequence_spec([*PROMPT, *whole[:9]], prompt_len=3, max_tokens=20))
    end = await router.end_of(1)
    assert router.tokens[1] == whole[9:]
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (3, 20)


async def test_one_message_per_step_for_all_sequences(fake_router, start_engine):
    engine = await start_engine(script=Script(step_delay_ms=20))
    router = await fake_router.attached()
    for handle in range(8):
        await router.submit(handle, sequence_spec([handle + 5, 9], max_tokens=10))
    for handle in range(8):
        await router.end_of(handle)
        assert router.tokens[handle] == expected_tokens([handle + 5, 9], 10)
    await engine.idle()
    await eventually(lambda: router.load.running == 0 and router.load.steps >= 10, "the last load")
    assert len(router.steps) <= router.load.steps < 20
    assert max(len(step.handles) for step in router.steps) == 8
    assert router.load.generated_tokens == 80


async def test_a_stop_token_ends_the_sequence_and_is_its_last_id(fake_router, start_engine):
    await start_engine()
    router = await fake_router.attached()
    tokens = expected_tokens(PROMPT, 12)
    await router.submit(1, sequence_spec(PROMPT, max_tokens=50, stop_token_ids=[tokens[6]]))
    end = await router.end_of(1)
    assert router.tokens[1] == tokens[:7]
    assert end.reason == common_pb2.FINISH_REASON_STOP
    assert end.stop_token_id == tokens[6]
    assert end.usage.completion_tokens == 7


async def test_a_rule_replays_tokens_and_logprobs_then_ends(fake_router, start_engine):
    rule = Rule(
        prompt=(1, 2), tokens=(40, 41), logprobs=(-0.25, -0.5), top_logprobs=(((40, -0.25), (7, -1.0)),) * 2
    )
    await start_engine(script=Script(rules=(rule,)))
    router = await fake_router.attached()
    await router.submit(1, sequence_spec([1, 2], top_logprobs=2))
    end = await router.end_of(1)
    assert router.tokens[1] == [40, 41, 2]
    assert end.reason == common_pb2.FINISH_REASON_STOP
    assert end.stop_token_id == 2
    own = sampled_logprob(2, 4)
    assert router.logprobs[1] == [
        (-0.25, [(40, -0.25), (7, -1.0)]),
        (-0.5, [(40, -0.25), (7, -1.0)]),
        (own, [(2, own), (3, own - 0.5)]),
    ]


async def test_logprobs_come_only_for_the_rows_that_asked(fake_router, start_engine):
    await start_engine(script=Script(step_delay_ms=10))
    router = await fake_router.attached()
    await router.submit(1, sequence_spec(PROMPT, max_tokens=4))
    await router.submit(2, sequence_spec(PROMPT, max_tokens=4, top_logprobs=0))
    await router.end_of(1)
    await router.end_of(2)
    assert list(router.logprobs) == [2]
    assert [best for _, best in router.logprobs[2]] == [[]] * 4


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_eos_ends_a_sequence_unless_it_is_ignored(fake_router, start_engine, ignore_eos):
    rule = Rule(match=Match.ANY, tokens=(40, 2, 41), then=Then.HASH)
    await start_engine(script=Script(rules=(rule,)))
    router = await fake_router.attached()
    await router.submit(1, sequence_spec(PROMPT, max_tokens=5, ignore_eos=ignore_eos))
    end = await router.end_of(1)
    if ignore_eos:
        assert end.reason == common_pb2.FINISH_REASON_LENGTH
        assert router.tokens[1][:3] == [40, 2, 41]
    else:
        assert end.reason == common_pb2.FINISH_REASON_STOP
        assert router.tokens[1] == [40, 2]


async def test_min_tokens_hold_the_end_back(fake_router, start_engine):
    rule = Rule(match=Match.ANY, tokens=(2, 2, 40), then=Then.EOS)
    await start_engine(script=Script(rules=(rule,)))
    router = await fake_router.attached()
    await router.submit(1, sequence_spec(PROMPT, max_tokens=10, min_tokens=2))
    end = await router.end_of(1)
    assert end.usage.completion_tokens == 4
    assert 2 not in router.tokens[1][:3]


async def test_without_max_tokens_the_context_is_filled(fake_router, start_engine):
    await start_engine(script=Script(model=ScriptedModel(max_model_len=40)))
    router = await fake_router.attached()
    await router.submit(1, sequence_spec(PROMPT, max_tokens=None))
    end = await router.end_of(1)
    assert end.reason == common_pb2.FINISH_REASON_LENGTH
    assert end.usage.completion_tokens == 37


async def test_sequences_wait_for_blocks_and_all_come_out_right(fake_router, start_engine):
    capacity = ScriptedCapacity(block_size=4, total_blocks=10, max_running=8, max_batched_tokens=16)
    engine = await start_engine(script=Script(capacity=capacity))
    router = await fake_router.attached()
    prompts = {handle: list(range(handle + 3, handle + 13)) for handle in range(12)}
    for handle, prompt in prompts.items():
        await router.submit(handle, sequence_spec(prompt, max_tokens=25))
    for handle, prompt in prompts.items():
        await router.end_of(handle)
        assert router.tokens[handle] == expected_tokens(prompt, 25)
    await engine.idle()
    assert max(load.used_blocks for load in router.loads) <= 10


async def test_a_full_engine_refuses_with_its_limit(fake_router, start_engine):
    script = Script(capacity=ScriptedCapacity(max_running=1, max_waiting=1), step_delay_ms=20)
    await start_engine(script=script)
    router = await fake_router.attached()
    for handle in (1, 2, 3):
        await router.submit(handle, sequence_spec(PROMPT, max_tokens=20))
    error = await router.refusal_of(3)
    assert error.code == common_pb2.ERROR_CODE_OVERLOADED
    assert error.retryable
    assert error.retry_after_ms
    assert "2 sequences" in error.message
    await router.end_of(1)
    await router.end_of(2)


async def test_a_rule_can_fail_a_sequence(fake_router, start_engine):
    await start_engine(script=Script(rules=(Rule(match=Match.ANY, tokens=(40, 41), then=Then.ERROR),)))
    router = await fake_router.attached()
    await router.submit(1, sequence_spec(PROMPT, max_tokens=10))
    end = await router.end_of(1)
    assert router.tokens[1] == [40, 41]
    assert end.reason == common_pb2.FINISH_REASON_ERROR
    assert end.error.code == common_pb2.ERROR_CODE_INTERNAL
