"""What a real router knows of the prefix caches of real engines."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import grpc

from catenary.blockhash import BlockHashes
from catenary.v1 import router_pb2
from catenary_testing.engine import Script, ScriptedCapacity
from services.engine.servicer.prefix_cache import PrefixCacheDelta
from tests.support.fleet import Fleet
from tests.support.kv_matched import matched
from tests.support.specs import expected_tokens, sequence_spec
from tests.support.waiting import eventually

CACHING = Script(capacity=ScriptedCapacity(block_size=4, prefix_caching=True))
PROMPT = list(range(10, 30))
FAST_KV: dict[str, Any] = {"kv_publish_interval_s": 0.01, "kv_resync_interval_s": 0.0}


def block_names(prompt: list[int], generated: int) -> list[bytes]:
    """Names of the blocks that a sequence leaves, in order."""
    hashes = BlockHashes(4)
    hashes.extend([*prompt, *expected_tokens(prompt, generated)][:-1])
    return hashes.hashes


async def known(fleet: Fleet) -> dict[str, tuple[int, bool]]:
    """By engine: blocks that the router knows of, and whether it knows all."""
    view = await fleet.view()
    return {engine.engine_name: (engine.indexed_blocks, engine.index_complete) for engine in view.engines}


async def test_what_an_engine_caches_is_in_the_index_of_every_router(start_fleet, secrets, run_dir):
    fleet = await start_fleet(engines=2, script=CACHING, **FAST_KV)
    (run_dir / "b").mkdir()
    other = Fleet(run_dir / "b", secrets)
    await other.start(engines=0)
    try:
        both = [fleet.router_address, other.router_address]
        options = {"listen": (f"unix:{run_dir}/both.sock",), "engine_name": "both"}
        engine = await fleet.add_engine(script=CACHING, routers=both, **options, **FAST_KV)
        await fleet.serving(3)
        await other.serving(1)
        tokens, _ = await other.answer(sequence_spec(PROMPT, max_tokens=9))
        assert tokens == expected_tokens(PROMPT, 9)
        names = block_names(PROMPT, 9)
        for router in (fleet.router, other.router):
            (attached,) = (each for each in router.fleet if each.instance_id == engine.instance_id)
            held = {attached: len(names)}
            await eventually(lambda r=router, held=held: matched(r.kv_index, names) == held, "the blocks")
        view = await known(fleet)
        assert view.pop("both") == (len(names), True)
        await eventually(
            lambda: all(fleet.router.kv_index.complete(each) for each in fleet.router.fleet), "all"
        )
        assert set((await known(fleet)).values()) == {(0, True), (len(names), True)}
    finally:
        await other.stop()


async def test_blocks_that_are_given_up_leave_the_index(start_fleet):
    small = Script(capacity=ScriptedCapacity(block_size=4, total_blocks=8, prefix_caching=True))
    fleet = await start_fleet(script=small, **FAST_KV)
    for first in range(100, 600, 100):
        prompt = list(range(first, first + 20))
        assert (await fleet.answer(sequence_spec(prompt, max_tokens=5)))[0] == expected_tokens(prompt, 5)
        names = block_names(prompt, 5)
        (engine,) = fleet.router.fleet
        index = fleet.router.kv_index
        await eventually(lambda: matched(index, names).get(engine) == len(names), "its blocks")  # noqa: B023
        assert index.blocks(engine) <= 8
        assert index.complete(engine)


async def test_a_restarted_or_lost_engine_is_forgotten(start_fleet):
    fleet = await start_fleet(script=CACHING, **FAST_KV)
    index, (engine,) = fleet.router.kv_index, fleet.router.fleet
    await fleet.answer(sequence_spec(PROMPT, max_tokens=9))
    await eventually(lambda: index.blocks(engine) == len(block_names(PROMPT, 9)), "the blocks")
    # The core restarts: its cache is new, the attachment is not.
    fleet.engines[0].faults.crash()
    await eventually(lambda: index.blocks(engine) == 0, "an empty cache")
    await fleet.serving(1)
    await fleet.answer(sequence_spec(PROMPT, max_tokens=9))
    await eventually(lambda: index.blocks(engine) and index.complete(engine), "the new core's blocks")
    # The stream is lost: another attachment tells all again.
    fleet.engines[0].drop_streams()
    await eventually(lambda: engine not in list(fleet.router.fleet), "the end of the attachment")
    assert index.blocks(engine) == 0
    await fleet.serving(1)
    (again,) = fleet.router.fleet
    await eventually(lambda: index.blocks(again) == len(block_names(PROMPT, 9)), "the blocks")
    await fleet.engines[0].stop()
    await eventually(lambda: index.pairs == 0, "nothing that is known")


async def test_changes_that_get_lost_are_found_and_made_good(start_fleet, monkeypatch):
    fleet = await start_fleet(script=CACHING, **FAST_KV)
    index, (engine,) = fleet.router.kv_index, fleet.router.fleet
    await eventually(lambda: index.complete(engine), "the first snapshot")
    take, lost = PrefixCacheDelta.take, []

    def lossy(delta):
        messages = take(delta)
        if lost or any(message.HasField("snapshot") for message in messages):
            return messages
        lost.extend(messages)
        return []

    monkeypatch.setattr(PrefixCacheDelta, "take", lossy)
    await fleet.answer(sequence_spec(PROMPT, max_tokens=9))
    await eventually(lambda: lost, "a message that is lost")
    other = [number + 100 for number in PROMPT]
    await fleet.answer(sequence_spec(other, max_tokens=9))
    for prompt in (PROMPT, other):
        names = block_names(prompt, 9)
        held = {engine: len(names)}
        await eventually(lambda names=names, held=held: matched(index, names) == held, "all blocks")
    assert index.complete(engine)
    assert fleet.router.fleet.find(engine.instance_id) is engine


async def test_whatever_happens_the_index_comes_to_what_the_engines_hold(start_fleet):
    """Cores that die, attachments that break, snapshots in between, caches that are far too small."""
    small = Script(capacity=ScriptedCapacity(block_size=4, total_blocks=24, prefix_caching=True))
    fleet = await start_fleet(engines=3, script=small, kv_publish_queue=6, **FAST_KV)
    index, rng = fleet.router.kv_index, random.Random(5)

    async def ask() -> None:
        prompt = [rng.randrange(3)] * rng.randrange(4, 40)
        # The engine may be lost meanwhile, which is another test's matter.
        with suppress(grpc.aio.AioRpcError):
            await fleet.answer(sequence_spec(prompt, max_tokens=rng.randrange(1, 12)))

    for _ in range(12):
        asked = [asyncio.create_task(ask()) for _ in range(6)]
        engine = rng.choice(fleet.engines)
        match rng.randrange(4):
            case 0:
                engine.faults.crash()
            case 1:
                engine.drop_streams()
            case 2:
                for delta in engine.app.frontend.prefix_cache.deltas:
                    delta.renew()
        await asyncio.gather(*asked)
        await fleet.serving(3)
    held = {engine.instance_id: engine.app.frontend.prefix_cache for engine in fleet.engines}

    def agrees() -> bool:
        for engine in fleet.router.fleet:
            names = held[engine.instance_id].names()
            if names is None or len(names) != index.blocks(engine) or not index.complete(engine):
                return False
            if any(engine not in matched(index, [name]) for name in names):
                return False
        return True

    await eventually(agrees, "an index of what the engines hold")
    assert index.pairs == sum(len(mirror.names()) for mirror in held.values()) > 0


async def test_turns_of_a_conversation_go_where_it_is_cached(start_fleet):
    fleet = await start_fleet(engines=3, script=CACHING, **FAST_KV)
    index, turns, places = fleet.router.kv_index, list(range(50, 170)), []
    for _ in range(5):
        spec = sequence_spec(turns, max_tokens=8)
        tokens, end = await fleet.answer(spec)
        request = router_pb2.ExplainRequest(request_id=spec.request_id)
        (receipt,) = (await fleet.stub.Explain(request)).receipts
        places.append((receipt.chosen, end.usage.cached_tokens))
        names = block_names(turns, 8)
        await eventually(
            lambda names=names: set(matched(index, names).values()) == {len(names)}, "the blocks"
        )
        turns += [*tokens, *range(10)]
    # The first turn may go anywhere; each later one finds all of the one before but its last token.
    first, *later = places
    assert first[1] == 0
    assert later == [(first[0], (120 + 18 * turn - 10 - 1) // 4 * 4) for turn in range(1, 5)]
