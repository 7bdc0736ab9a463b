"""Explain over gRPC, and the choice of a policy for a model."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from catenary.v1 import router_pb2
from catenary_testing.engine import Script, ScriptedCapacity
from services.router.config import RouterConfig
from tests.support.specs import expected_tokens, sequence_spec
from tests.support.waiting import eventually


async def test_explain_tells_where_requests_went_and_why(start_fleet):
    fleet = await start_fleet(engines=2, router={"receipts": 3})
    specs = [sequence_spec([number]) for number in range(5)]
    for spec in specs:
        await fleet.answer(spec)
    latest = (await fleet.stub.Explain(router_pb2.ExplainRequest())).receipts
    assert [receipt.request_id for receipt in latest] == [spec.request_id for spec in specs[:1:-1]]
    (one,) = (await fleet.stub.Explain(router_pb2.ExplainRequest(request_id=specs[4].request_id))).receipts
    assert one.model == "scripted"
    assert one.considered == 2
    assert one.chosen in {candidate.instance_id for candidate in one.candidates}
    assert len((await fleet.stub.Explain(router_pb2.ExplainRequest(limit=2))).receipts) == 2
    assert not (await fleet.stub.Explain(router_pb2.ExplainRequest(request_id="nobody"))).receipts


async def test_a_prompt_goes_to_the_engine_that_has_it_cached(start_fleet):
    script = Script(capacity=ScriptedCapacity(block_size=4, prefix_caching=True))
    fleet = await start_fleet(engines=3, script=script, kv_publish_interval_s=0.01)
    prompt = list(range(40))
    await fleet.answer(sequence_spec(prompt))
    holder = (await fleet.stub.Explain(router_pb2.ExplainRequest())).receipts[0].chosen
    await eventually(lambda: fleet.router.kv_index.pairs >= 10, "the blocks in the index")
    for suffix in range(6):
        tokens, end = await fleet.answer(sequence_spec([*prompt, 50 + suffix]))
        assert tokens == expected_tokens([*prompt, 50 + suffix], 8)
        assert end.usage.cached_tokens == 40
        receipt = (await fleet.stub.Explain(router_pb2.ExplainRequest())).receipts[0]
        assert receipt.chosen == holder
        assert (receipt.policy, receipt.reason) == ("cost", "lowest_cost")
        matched = {one.instance_id: (one.matched_tokens, one.match_is_exact) for one in receipt.candidates}
        assert matched.pop(holder) == (40, True)
        assert set(matched.values()) == {(0, True)}


async def test_a_model_has_the_policy_that_it_was_given(start_fleet):
    router = {"placement": "least_loaded", "placement_for": ("scripted=least_loaded",)}
    fleet = await start_fleet(engines=1, router=router)
    await fleet.answer(sequence_spec([1]))
    (receipt,) = (await fleet.stub.Explain(router_pb2.ExplainRequest())).receipts
    assert receipt.policy == "least_loaded"


@pytest.mark.parametrize("pairs", ["m", "=least_loaded", "m=nope", "m=least_loaded,m=least_loaded"])
def test_a_bad_choice_ends_the_start(pairs):
    with pytest.raises(ValidationError):
        RouterConfig(placement_for=pairs, insecure=True)


def test_a_models_name_may_hold_an_equals_sign():
    config = RouterConfig(placement_for="a=b=least_loaded,c=least_loaded", insecure=True)
    assert config.placements() == {"a=b": "least_loaded", "c": "least_loaded"}
