"""One request is one trace through gateway, tokenizer, router and engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from catenary_testing.engine import Rule, Script
from catenary_testing.engine.script import Then
from tests.support.fleet import Fleet
from tests.support.gateway import CHAT, Stack, running_stack, tokenizer_process
from tests.support.spans import Collector, SeenSpan, Spans, collector, spans_here
from tests.support.specs import sequence_spec
from tests.support.waiting import eventually

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
WORDS = "never to be traced"
KEY = "sk-never-to-be-traced"


@pytest.fixture
def spans() -> Iterator[Spans]:
    with spans_here() as seen:
        yield seen


async def ended(spans: Spans, *names: str) -> dict[str, SeenSpan]:
    """Spans of these names, once all are over; there is one of each."""
    await eventually(lambda: set(names) <= {span.name for span in spans.all()}, f"spans {names}")
    return {name: one for name in names for (one,) in [spans.named(name)]}


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """Processes that are started meanwhile export to this one."""
    with collector() as seen:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", seen.address)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        yield seen


async def test_one_request_is_one_trace(spans: Spans, collected: Collector, run_dir: Path) -> None:
    with tokenizer_process(run_dir) as (target, _):
        async with running_stack(run_dir, target, api_key=(KEY,)) as stack:
            body = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 4}
            headers = {"traceparent": PARENT, "authorization": f"Bearer {KEY}"}
            answer = await stack.post(CHAT, body, headers)
            assert answer.status == 200, answer.body
            found = await ended(spans, f"POST {CHAT}", "render", "generate", "route", "prefill", "decode")
            rendering = "catenary.v1.TokenizerService/Render"
            await eventually(
                lambda: any(span.trace == TRACE for span in collected.spans), "the tokenizer's span"
            )
            await stack.idle()
    (tokenizer,) = (span for span in collected.spans if span.trace == TRACE)
    parents = {
        f"POST {CHAT}": PARENT[36:52],
        "render": found[f"POST {CHAT}"].id,
        "generate": found[f"POST {CHAT}"].id,
        "route": found["generate"].id,
        "prefill": found["route"].id,
        "decode": found["route"].id,
    }
    assert {name: (span.trace, span.parent) for name, span in found.items()} == {
        name: (TRACE, parent) for name, parent in parents.items()
    }
    assert (tokenizer.name, tokenizer.parent) == (rendering, found["render"].id)
    assert collected.services == {"catenary-tokenizer"}
    usage = answer.json()["usage"]
    assert found["generate"].attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["decode"].attributes["gen_ai.usage.output_tokens"] == 4
    assert found[f"POST {CHAT}"].attributes["http.response.status_code"] == 200
    assert found["route"].start <= found["route"].end <= found["decode"].end
    everything = repr([*spans.all(), *collected.spans])
    assert WORDS not in everything
    assert KEY not in everything


async def test_the_routes_span_tells_the_receipt(spans: Spans, start_fleet: Any) -> None:
    fleet: Fleet = await start_fleet(engines=2)
    spec = sequence_spec([1, 2, 3], max_tokens=2, traceparent=PARENT)
    await fleet.answer(spec)
    (receipt,) = fleet.router.receipts.find(None, 10)
    route = (await ended(spans, "route", "decode"))["route"]
    assert (route.trace, route.parent) == (TRACE, PARENT[36:52])
    told = {name.removeprefix("catenary.route."): value for name, value in route.attributes.items()}
    assert told["policy"] == receipt.policy
    assert told["reason"] == receipt.reason
    assert told["chosen"] == receipt.chosen
    assert (told["half"], told["placement"], told["considered"]) == ("whole", 1, 2)
    assert set(told["candidates"]) == {engine.instance_id for engine in fleet.router.fleet}
    assert len(told["candidates.score"]) == len(told["candidates.matched_tokens"]) == 2


async def test_both_parts_and_refusals_have_spans(spans: Spans, start_fleet: Any) -> None:
    fleet: Fleet = await start_fleet(engines=0, router={"handover_min_tokens": 16})
    for role in ("prefill", "decode"):
        await fleet.add_engine(role=role, script=Script())
    await fleet.serving(2)
    await fleet.answer(sequence_spec(list(range(3, 60)), max_tokens=3))
    await eventually(lambda: spans.named("decode"), "the end")
    routes = spans.named("route")
    assert [route.attributes["catenary.route.half"] for route in routes] == ["prompt", "rest"]
    assert [span.parent for span in spans.named("prefill")] == [route.id for route in routes]
    assert [span.parent for span in spans.named("decode")] == [routes[1].id]
    receipts = [receipt.part.name.lower() for receipt in fleet.router.receipts.find(None, 10)]
    assert receipts == ["rest", "prompt"]


async def test_a_refused_sequence_has_a_second_route_and_failures_are_marked(
    spans: Spans, start_fleet: Any
) -> None:
    fails = Rule(prompt=(9, 9), then=Then.ERROR)
    fleet: Fleet = await start_fleet(engines=2, script=Script(rules=(fails,)))
    fleet.engines[0].faults.refuse_next()
    await asyncio.gather(*[fleet.answer(sequence_spec([number, 2, 3])) for number in range(2)])
    await eventually(lambda: len(spans.named("decode")) == 2, "the ends")
    last = {route.attributes["catenary.sequence_id"]: route for route in spans.named("route")}
    assert sorted(route.attributes["catenary.route.placement"] for route in last.values()) == [1, 2]
    for prefill in spans.named("prefill"):
        assert prefill.parent == last[prefill.attributes["catenary.sequence_id"]].id
    with pytest.raises(grpc.aio.AioRpcError):
        await fleet.answer(sequence_spec([1], model="unknown"))
    (refused,) = (route for route in spans.named("route") if route.failed)
    assert refused.attributes["error.type"] == "ERROR_CODE_MODEL_NOT_FOUND"
    with pytest.raises(grpc.aio.AioRpcError):
        await fleet.answer(sequence_spec([9, 9], traceparent=PARENT))
    # It is run once more, on the other engine.
    failed = [span for span in spans.named("prefill") if span.failed]
    routes = [route.id for route in spans.named("route") if route.parent == PARENT[36:52]]
    assert [(span.trace, span.parent) for span in failed] == [(TRACE, route) for route in routes]
    assert {span.attributes["error.type"] for span in failed} == {"ERROR_CODE_INTERNAL"}


async def test_a_plain_call_is_a_span_and_its_routes_parent(spans: Spans, start_fleet: Any) -> None:
    fleet: Fleet = await start_fleet(engines=1)
    await fleet.answer(sequence_spec([1, 2, 3], max_tokens=2))
    call = "catenary.v1.RouterService/Generate"
    found = await ended(spans, call, "route", "decode")
    assert (found[call].parent, found["route"].parent) == ("", found[call].id)


async def test_streams_and_probes_have_no_spans(spans: Spans, start_stack: Any) -> None:
    stack: Stack = await start_stack()
    for path in ("/health", "/metrics", "/live"):
        await stack.get(path)
    assert spans.all() == []
