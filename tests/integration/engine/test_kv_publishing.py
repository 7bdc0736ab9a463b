"""Engines that publish what their prefix cache holds, to routers that do what a test says."""

from __future__ import annotations

import grpc
import pytest

from catenary.blockhash import BlockHashes
from catenary.v1 import common_pb2, engine_pb2
from catenary_testing.engine import Script, ScriptedCapacity, ScriptedModel
from tests.support.fake_router import FakeRouter
from tests.support.specs import expected_tokens, sequence_spec
from tests.support.waiting import eventually

CACHING = Script(capacity=ScriptedCapacity(block_size=4, prefix_caching=True))
PROMPT = list(range(10, 22))
FAST_KV = {"kv_publish_interval_s": 0.01, "kv_resync_interval_s": 0.0}


def names_after(prompt: list[int], generated: int) -> set[bytes]:
    """Names of the blocks that a sequence leaves: the last token's KV is not computed."""
    hashes = BlockHashes(4)
    hashes.extend([*prompt, *expected_tokens(prompt, generated)][:-1])
    return set(hashes.hashes)


async def run(attachment, handle: int, prompt: list[int], max_tokens: int = 8):
    await attachment.submit(handle, sequence_spec(prompt, max_tokens=max_tokens))
    return await attachment.end_of(handle)


async def test_blocks_are_told_as_they_are_cached_and_given_up(fake_router, start_engine):
    small = Script(capacity=ScriptedCapacity(block_size=4, total_blocks=8, prefix_caching=True))
    await start_engine(script=small, **FAST_KV)
    attachment = await fake_router.attached()
    assert attachment.hello.publishes_kv
    publication = await fake_router.published()
    assert publication.hello == engine_pb2.KvHello(
        instance_id=attachment.hello.instance_id, lease_epoch=attachment.epoch, block_size=4
    )
    assert publication.known.names == set()
    await run(attachment, 1, PROMPT)
    await eventually(lambda: publication.known.names == names_after(PROMPT, 8), "the sequence's blocks")
    other = [number + 100 for number in PROMPT]
    await run(attachment, 2, other)
    await eventually(lambda: names_after(other, 8) <= publication.known.names, "the next one's")
    assert len(publication.known.names) <= 8
    assert publication.known.snapshots == 1


async def test_a_prompt_that_begins_alike_counts_its_cached_tokens(fake_router, start_engine):
    await start_engine(script=CACHING, **FAST_KV)
    attachment = await fake_router.attached()
    assert (await run(attachment, 1, PROMPT)).usage.cached_tokens == 0
    end = await run(attachment, 2, [*PROMPT, 99])
    assert end.usage == common_pb2.Usage(prompt_tokens=13, cached_tokens=12, completion_tokens=8)
    assert attachment.tokens[1] == expected_tokens(PROMPT, 8)
    assert attachment.tokens[2] == expected_tokens([*PROMPT, 99], 8)
    await eventually(lambda: attachment.load.prompt_tokens == 25, "the counters")
    assert attachment.load.cached_prompt_tokens == 12
    assert attachment.load.preemptions == 0


async def test_a_resync_is_answered_with_a_snapshot(fake_router, start_engine):
    await start_engine(script=CACHING, **FAST_KV)
    attachment = await fake_router.attached()
    publication = await fake_router.published()
    await run(attachment, 1, PROMPT)
    await eventually(lambda: publication.known.names, "the blocks")
    await publication.resync()
    await eventually(lambda: publication.known.snapshots == 2, "a second snapshot")
    assert publication.known.names == names_after(PROMPT, 8)
    await run(attachment, 2, PROMPT[:5])
    await eventually(lambda: publication.known.names > names_after(PROMPT, 8), "what came after it")


@pytest.mark.advisory("CVE-2025-30202")
async def test_a_router_that_does_not_read_gets_a_snapshot_in_the_end(fake_router, start_engine):
    """What waits is bounded, and the sequences do not notice."""
    await start_engine(script=CACHING, kv_publish_queue=4, **FAST_KV)
    attachment = await fake_router.attached()
    publication = await fake_router.published()
    # The next message waits in the fake router's hands.
    fake_router.reading.clear()
    prompts = [[number] * 60 for number in range(100, 140)]
    for handle, prompt in enumerate(prompts, 1):
        await attachment.submit(handle, sequence_spec(prompt, max_tokens=2))
    fake_router.reading.set()
    for handle, prompt in enumerate(prompts, 1):
        await attachment.end_of(handle)
        assert attachment.tokens[handle] == expected_tokens(prompt, 2)
    held = set.union(*(names_after(prompt, 2) for prompt in prompts))
    await eventually(lambda: publication.known.names == held, "all blocks")
    assert publication.known.snapshots > 1


async def test_a_lost_stream_is_opened_again_and_the_attachment_stays(fake_router, start_engine):
    fake_router.refuses_kv = common_pb2.Error(
        code=common_pb2.ERROR_CODE_INVALID_ARGUMENT, message="You lie.", retryable=False
    )
    engine = await start_engine(script=CACHING, attach_refused_backoff_s=0.02, **FAST_KV)
    attachment = await fake_router.attached()
    await eventually(lambda: len(fake_router.publications) >= 3, "further attempts")
    await run(attachment, 1, PROMPT)
    fake_router.refuses_kv = None
    publication = await fake_router.published(4)
    assert publication.known.names == names_after(PROMPT, 8)
    assert len(fake_router.attachments) == 1
    assert attachment.tokens[1] == expected_tokens(PROMPT, 8)
    # A new attachment has a new stream, with its epoch.
    before = len(fake_router.publications)
    engine.drop_streams()
    again = await fake_router.attached(2)
    last = await fake_router.published(before + 1)
    await eventually(lambda: publication.closed, "the end of the first stream")
    assert (last.hello.lease_epoch, last.known.names) == (again.epoch, names_after(PROMPT, 8))


async def test_a_dead_core_has_nothing_cached(fake_router, start_engine):
    engine = await start_engine(script=CACHING, **FAST_KV)
    attachment = await fake_router.attached()
    publication = await fake_router.published()
    await run(attachment, 1, PROMPT)
    await eventually(lambda: publication.known.names, "the blocks")
    engine.faults.crash()
    await eventually(lambda: not publication.known.names, "an empty cache")
    await eventually(lambda: publication.known.snapshots == 2, "the next core's snapshot")
    await run(attachment, 2, PROMPT)
    await eventually(lambda: publication.known.names == names_after(PROMPT, 8), "the blocks")
    assert len(fake_router.publications) == 1
    assert attachment.load.prompt_tokens == 24


async def test_each_of_several_routers_is_told_all(fake_router, start_engine, secrets, run_dir):
    other = FakeRouter(secrets, f"unix:{run_dir}/other.sock")
    await other.start()
    try:
        await start_engine(routers=[fake_router.address, other.address], script=CACHING, **FAST_KV)
        first, second = await fake_router.attached(), await other.attached()
        await run(first, 1, PROMPT)
        await run(second, 1, PROMPT[:8])
        expected = names_after(PROMPT, 8) | names_after(PROMPT[:8], 8)
        for router in (fake_router, other):
            publication = await router.published()
            await eventually(lambda known=publication.known: known.names == expected, "all blocks")
    finally:
        await other.stop()


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (CACHING, {"publish_kv": False}),
        (Script(), {}),
        (
            Script(
                capacity=ScriptedCapacity(prefix_caching=True),
                model=ScriptedModel(task="embed", embedding_width=8),
            ),
            {},
        ),
    ],
    ids=["switched off", "no cache", "no KV"],
)
async def test_who_has_nothing_to_publish_says_so(fake_router, start_engine, script, options):
    engine = await start_engine(script=script, **options)
    attachment = await fake_router.attached()
    assert not attachment.hello.publishes_kv
    await eventually(lambda: len(attachment.loads) > 2, "some reports")
    assert not fake_router.publications
    assert engine.app.frontend.prefix_cache.names() is None


async def test_a_router_without_the_method_is_served_all_the_same(fake_router, start_engine, monkeypatch):
    async def missing(self, request_iterator, context):
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")

    monkeypatch.setattr(FakeRouter, "PublishKv", missing)
    await start_engine(script=CACHING, **FAST_KV)
    attachment = await fake_router.attached()
    await run(attachment, 1, PROMPT)
    assert attachment.tokens[1] == expected_tokens(PROMPT, 8)
    assert len(fake_router.attachments) == 1
