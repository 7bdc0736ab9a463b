"""Routers that die, restart, fall silent or drain, engines that drain in a hurry: no request fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.batches import ended, line, results, started
from tests.support.cluster import Cluster
from tests.support.gateway import COMPLETIONS, script
from tests.support.proxy import LinkProxy
from tests.support.stack_fixtures import StartCluster
from tests.support.waiting import eventually

TOKENS = 60
SLOW = script(step_delay_ms=4)


def body(name: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": name, "max_tokens": TOKENS, "seed": 5, **fields}


class Load:
    """Requests under way, half of them streamed, and the answers that they must get."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._bodies = [body(name, stream=index % 2 == 0) for index, name in enumerate("abcdefgh")]
        self._expected: list[str] = []
        self._jobs: list[asyncio.Task[str]] = []

    async def prepare(self) -> None:
        """Ask for everything while all is well."""
        self._expected = list(await asyncio.gather(*map(self._ask, self._bodies)))

    async def begin(self) -> None:
        """Ask again, and wait until the engines are at it, all at once: on a slow machine the first one would
        have ended before the last one is there."""
        engines, count = self._cluster.engines, len(self._bodies)
        for engine in engines:
            engine.faults.stall()
        self._jobs = [asyncio.create_task(self._ask(one)) for one in self._bodies]
        await eventually(
            lambda: sum(engine.app.frontend.live_sequences for engine in engines) == count, "all of them"
        )
        for engine in engines:
            engine.faults.resume()
        await eventually(lambda: self._running() == count, "all of them running")

    async def exact(self, timeout_s: float = 20) -> None:
        """All answers came, and are the right ones."""
        async with asyncio.timeout(timeout_s):
            assert await asyncio.gather(*self._jobs) == self._expected
        await self._cluster.idle()

    def _running(self) -> int:
        return sum(engine.app.frontend.load().running for engine in self._cluster.engines)

    async def _ask(self, request: dict[str, Any]) -> str:
        answer = await self._cluster.post(COMPLETIONS, request)
        assert answer.status == 200, answer.body
        if not request["stream"]:
            return str(answer.json()["choices"][0]["text"])
        assert answer.events[-1] == "[DONE]"
        assert not any("error" in event for event in answer.events[:-1])
        return "".join(choice["text"] for event in answer.events[:-1] for choice in event["choices"])


@pytest.fixture
async def proxy(run_dir: Path) -> AsyncIterator[LinkProxy]:
    """A proxy in front of the first router of a cluster."""
    proxy = LinkProxy(run_dir, f"unix:{run_dir}/router-0.sock")
    await proxy.start()
    yield proxy
    await proxy.stop()


async def test_one_of_two_routers_ends(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(SLOW, routers=2)
    load = Load(cluster)
    await load.prepare()
    await load.begin()
    live = [router.admission.live_sequences for router in cluster.running]
    assert live == [4, 4]
    await cluster.stop_router(0)
    await load.exact()
    assert await cluster.metric("catenary_resumed_sequences_total") == 4
    assert cluster.gateway.ready


async def test_the_only_router_restarts(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(SLOW)
    load = Load(cluster)
    await load.prepare()
    await load.begin()
    await cluster.stop_router(0)
    # What comes meanwhile waits as well, before anything is known again.
    late = asyncio.create_task(cluster.post(COMPLETIONS, body("late")))
    await eventually(lambda: cluster.gateway.upstreams.session.live == 9, "nine that wait")
    assert not cluster.gateway.ready
    await cluster.start_router(0)
    later = asyncio.create_task(cluster.post(COMPLETIONS, body("late")))
    await load.exact()
    assert (await late).json()["choices"] == (await later).json()["choices"]


async def test_a_router_that_cannot_be_heard(
    start_cluster: StartCluster, proxy: LinkProxy, run_dir: Path
) -> None:
    dialled = (proxy.address, f"unix:{run_dir}/router-1.sock")
    cluster = await start_cluster(SLOW, routers=2, dialled=dialled)
    load = Load(cluster)
    await load.prepare()
    await load.begin()
    proxy.freeze()
    await load.exact()
    # What waited in the network is of a stream that nobody reads any more.
    proxy.thaw()
    await cluster.serving()


async def test_a_link_that_breaks(start_cluster: StartCluster, proxy: LinkProxy) -> None:
    cluster = await start_cluster(SLOW, dialled=(proxy.address,))
    load = Load(cluster)
    await load.prepare()
    for _ in range(3):
        await load.begin()
        proxy.cut()
        await load.exact()
    assert await cluster.metric("catenary_resumed_sequences_total") == 24


async def test_a_router_drains_under_load(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(SLOW, routers=2, router={"drain_s": 0.1})
    load = Load(cluster)
    await load.prepare()
    await load.begin()
    leaving, stays = cluster.running
    draining = asyncio.create_task(leaving.drain())
    sessions = cluster.gateway.upstreams.session
    await eventually(lambda: sessions.rendezvous("", "tiny") is not None, "one router left to choose")
    answers = await asyncio.gather(*[cluster.post(COMPLETIONS, body("new")) for _ in range(4)])
    assert {answer.status for answer in answers} == {200}
    await draining
    await cluster.stop_router(0)
    await load.exact()
    assert stays.admission.live_sequences == 0


async def test_what_waits_in_a_draining_router_goes_to_a_full_one(
    start_cluster: StartCluster,
) -> None:
    narrow = script(step_delay_ms=10, capacity={"max_running": 1, "max_waiting": 0})
    options = {"lane_sequences": (1,) * 4, "drain_s": 5.0}
    cluster = await start_cluster(narrow, engines=1, routers=2, router=options)
    jobs = [asyncio.create_task(cluster.post(COMPLETIONS, body("a")))]

    def known() -> bool:
        return all(engine.sequences for router in cluster.running for engine in router.fleet)

    await eventually(known, "both routers know that the engine is full")
    jobs += [asyncio.create_task(cluster.post(COMPLETIONS, body(name))) for name in "bc"]

    def live() -> list[int]:
        return sorted(router.admission.live_sequences for router in cluster.running)

    await eventually(lambda: live() == [1, 2], "one that waits in each router")
    leaving = next(router for router in cluster.running if router.admission.live_sequences == 2)
    draining = asyncio.create_task(leaving.drain())
    assert [answer.status for answer in await asyncio.gather(*jobs)] == [200] * 3
    await draining


async def test_an_engine_drains_with_a_deadline(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(SLOW, engines=2)
    load = Load(cluster)
    await load.prepare()
    await load.begin()
    # Far less time than its sequences need.
    await cluster.engines[0].stop(0.05)
    await load.exact()
    assert await cluster.metric("catenary_resumed_sequences_total") == 4
    # Who leaves in good order has killed nobody, and nobody was made to run alone for it.
    assert await cluster.metric("catenary_given_up_sequences_total") == 0


async def test_how_long_a_client_waits_is_asked_of_newcomers(start_cluster: StartCluster) -> None:
    narrow = script(step_delay_ms=4, capacity={"max_running": 1, "max_waiting": 0})
    cluster = await start_cluster(narrow, engines=2)
    headers = {"x-max-wait-ms": "0"}
    jobs = [
        asyncio.create_task(cluster.post(COMPLETIONS, body(name), headers=headers)) for name in ("a", "b")
    ]
    await eventually(lambda: len(cluster.busy) == 2, "two engines at work")
    refused = await cluster.post(COMPLETIONS, body("c"), headers=headers)
    assert refused.status == 408
    # The other engine has no room for what it had.
    await cluster.engines[0].stop()
    assert [answer.status for answer in await asyncio.gather(*jobs)] == [200, 200]


async def test_a_batch_and_a_background_response(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(SLOW, routers=2)
    lines = [line(name, body(name)) for name in "abcdef"]
    base_url = f"{cluster.gateway.address}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="k", max_retries=0) as client:
        texts = []
        for fault in (None, 0, 1):
            batch = await started(client, lines)
            response = await client.responses.create(
                model="tiny", input="x", background=True, max_output_tokens=TOKENS, extra_body={"seed": 4}
            )
            if fault is not None:
                await eventually(lambda: len(cluster.busy) == 2, "engines at work")
                cluster.engines[fault].faults.crash()
            batch = await ended(client, batch)
            while response.status in ("queued", "in_progress"):
                await asyncio.sleep(0.02)
                response = await client.responses.retrieve(response.id)
            found = await results(client, batch.output_file_id)
            assert (batch.status, batch.error_file_id) == ("completed", None)
            answers = {name: item["response"]["body"]["choices"] for name, item in found.items()}
            texts.append((response.status, response.output_text, answers))
    assert texts[0] == texts[1] == texts[2]
    assert await cluster.metric("catenary_resumed_sequences_total") > 0


async def test_a_tenant_stays_on_one_router(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(SLOW, routers=3)
    session = cluster.gateway.upstreams.session
    homes = {tenant: session.rendezvous(tenant, "tiny") for tenant in map(str, range(60))}
    addresses = [home.address for home in homes.values() if home is not None]
    assert {addresses.count(cluster.address(index)) > 5 for index in range(3)} == {True}
    assert session.rendezvous("", "tiny") is None
    gone = cluster.address(0)
    await cluster.stop_router(0)
    await eventually(lambda: session.connected == 2, "two routers")
    for tenant, home in homes.items():
        now = session.rendezvous(tenant, "tiny")
        assert home is not None
        assert now is not None
        assert now is home or home.address == gone
