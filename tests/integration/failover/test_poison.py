"""A request that kills engines: refused after three, and nobody beside it is harmed."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from catenary.rpc import error_of
from catenary.v1 import common_pb2
from catenary_testing.engine import Match, Rule, Script, Then
from tests.support.cluster import Cluster
from tests.support.gateway import COMPLETIONS, saying, script
from tests.support.specs import expected_tokens, sequence_spec
from tests.support.stack_fixtures import StartCluster
from tests.support.waiting import eventually

POISON = {"prompt": "!", "max_tokens": 8}
DEATHS = 3


def crashes(cluster: Cluster) -> int:
    return sum(engine.app.frontend.core_restarts for engine in cluster.engines)


async def refused(cluster: Cluster, **fields: Any) -> None:
    answer = await cluster.post(COMPLETIONS, {**POISON, **fields})
    assert (answer.status, answer.json()["error"]["code"]) == (400, "request_poisoned")


@pytest.mark.parametrize("said", ["", "some"], ids=["in its prompt", "later"])
async def test_a_guilty_request_among_innocent_ones(start_cluster: StartCluster, said: str) -> None:
    cluster = await start_cluster(script(saying(said, "!", then="crash"), step_delay_ms=5), engines=3)
    bodies = [{"prompt": f"{name}", "max_tokens": 40, "seed": 1} for name in "abcdef"]
    expected = [(await cluster.post(COMPLETIONS, body)).json()["choices"] for body in bodies]
    # These decode while it comes, and those begin together with it.
    early = [asyncio.create_task(cluster.post(COMPLETIONS, body)) for body in bodies[:3]]
    await eventually(
        lambda: sum(e.app.frontend.load().running for e in cluster.engines) == 3, "three streams"
    )
    guilty = asyncio.create_task(refused(cluster))
    late = [asyncio.create_task(cluster.post(COMPLETIONS, body)) for body in bodies[3:]]
    await guilty
    answers = await asyncio.gather(*early, *late)
    assert [answer.json()["choices"] for answer in answers] == expected
    # In the first life it may have said something: that engine's death was not counted.
    await eventually(lambda: crashes(cluster) == DEATHS + bool(said), "as many restarts")
    # From now on it is known, whatever its seed and its name.
    await refused(cluster, seed=7)
    await refused(cluster, stream=True)
    assert crashes(cluster) == DEATHS + bool(said)
    other = await cluster.post(COMPLETIONS, {**POISON, "max_tokens": 2, "prompt": "?"})
    assert other.status == 200
    assert await cluster.metric("catenary_given_up_sequences_total") == 0


async def test_innocent_ones_that_shared_its_first_forward_twice(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(script(saying("", "!", then="crash")), engines=2)
    body = {"prompt": ["a", "b"], "max_tokens": 9, "seed": 1}
    expected = (await cluster.post(COMPLETIONS, body)).json()["choices"]
    for engine in cluster.engines:
        engine.faults.stall()
    jobs = [asyncio.create_task(cluster.post(COMPLETIONS, body)) for _ in range(2)]
    await eventually(
        lambda: sum(e.app.frontend.live_sequences for e in cluster.engines) == 4, "four that wait"
    )
    guilty = [asyncio.create_task(refused(cluster)) for _ in range(2)]
    await eventually(
        lambda: sum(e.app.frontend.live_sequences for e in cluster.engines) == 6, "six that wait"
    )
    for engine in cluster.engines:
        engine.faults.resume()
    await asyncio.gather(*guilty)
    assert [(await job).json()["choices"] for job in jobs] == [expected] * 2


async def test_a_plain_call_that_kills_engines(start_fleet: Any) -> None:
    rule = Rule(prompt=(5,), match=Match.PREFIX, then=Then.CRASH)
    fleet = await start_fleet(engines=2, script=Script(rules=(rule,), step_delay_ms=2))
    beside = asyncio.create_task(fleet.answer(sequence_spec([7], max_tokens=100)))
    for number in range(2):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fleet.answer(sequence_spec([5, 6], seed=number))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        error = error_of(caught.value)
        assert (error.code, error.retryable) == (common_pb2.ERROR_CODE_POISONED, False)
    assert (await beside)[0] == expected_tokens([7], 100)
    assert sum(engine.app.frontend.core_restarts for engine in fleet.engines) == DEATHS
    assert fleet.router.metrics.registry.get_sample_value("catenary_router_poisoned_total") == 1


async def test_no_router_runs_what_another_has_convicted(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(script(saying("", "!", then="crash")), routers=2)
    await refused(cluster)
    await eventually(lambda: crashes(cluster) == DEATHS, "as many restarts")
    await refused(cluster, n=2)
    await cluster.stop_router(0)
    await refused(cluster)
    assert crashes(cluster) == DEATHS
