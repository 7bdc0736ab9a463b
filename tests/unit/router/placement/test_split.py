"""Which half of a sequence an engine computes, by what its peers have cached."""

from __future__ import annotations

import pytest

from catenary.v1 import common_pb2, engine_pb2
from services.router.admission import Refused
from services.router.placement import SplitPart, SplitPlacer
from tests.support.placement import BLOCK, World, request

PROMPT = 4096


def placer_of(world):
    return SplitPlacer(world.placer, min_handover_tokens=256)


def test_what_only_an_engine_for_prompts_has_cached_is_not_computed_by_others():
    world = World("cost")
    prefill = world.attach("p", role=engine_pb2.ENGINE_ROLE_PREFILL, publishes_kv=True)
    decode = world.attach("d", role=engine_pb2.ENGINE_ROLE_DECODE, publishes_kv=True)
    placer = placer_of(world)
    asked = request("a", range(PROMPT), part=SplitPart.PROMPT)
    world.caches(prefill, asked, 1000)
    placed = placer.place(asked)
    assert (placed.engine, asked.placed_part) == (prefill, SplitPart.PROMPT)
    assert asked.uncached_tokens == PROMPT - 1000 * BLOCK
    # Where it could go on with what it has, it stays in one piece.
    world.caches(decode, asked, 1000)
    asked = request("b", range(PROMPT), part=SplitPart.PROMPT)
    placed = placer.place(asked)
    assert (placed.engine, asked.placed_part) == (decode, SplitPart.WHOLE)


def test_where_there_are_only_engines_for_prompts_they_may_be_full():
    world = World("cost")
    prefill = world.attach("p", role=engine_pb2.ENGINE_ROLE_PREFILL, slots=1)
    placer = placer_of(world)
    assert placer.place(request()).engine is prefill
    prefill.placed_sequences += 1
    with pytest.raises(Refused) as caught:
        placer.place(request())
    assert caught.value.error.code == common_pb2.ERROR_CODE_OVERLOADED
    with pytest.raises(Refused) as caught:
        placer.place(request(), excluding=[prefill])
    assert caught.value.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
