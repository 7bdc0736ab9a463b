"""The load tool against a server that streams as told, and against one that misbehaves."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from itertools import pairwise

import pytest

from catenary_apps.load import (
    Arrivals,
    BenchError,
    Conversation,
    Endpoint,
    LoadPlan,
    LoadResult,
    Progress,
    Target,
    Turn,
    run_load,
)
from tests.support.sse_origin import HEAD, Exchange, Origin, polite, running_origin


def _questions(count: int, tokens: int = 4, turns: int = 1) -> list[Conversation]:
    return [
        Conversation(tuple(Turn(f"q{number}.{turn}", tokens) for turn in range(turns)))
        for number in range(count)
    ]


async def _load(origin: Origin, count: int = 4, *, turns: int = 1, **fields: object) -> LoadResult:
    """A run; fields of the target are taken out of the plan's."""
    target = {name: fields.pop(name) for name in ("endpoint", "timeout_s", "extra_body") if name in fields}
    plan = LoadPlan(
        target=Target(base_url=origin.address, **{"timeout_s": 20.0, **target}),  # type: ignore[arg-type]
        conversations=_questions(count, turns=turns),
        **fields,  # type: ignore[arg-type]
    )
    return await run_load(plan)


async def test_a_run_counts_tokens_by_usage_and_keeps_its_connections() -> None:
    async def two_a_chunk(exchange: Exchange) -> None:
        await exchange.raw(HEAD)
        for _ in range(2):
            await exchange.token("xy")
        await exchange.finish(usage=(3, 4))

    async with running_origin(two_a_chunk) as origin:
        result = await _load(origin, 10, max_concurrency=2, warmup=2)
        assert (result.model, result.completed, result.failures) == ("m", 8, {})
        assert (result.input_tokens, result.output_tokens, result.chunks) == (24, 32, 16)
        assert result.peak_concurrency <= 2
        assert result.ttft_ms.count == result.e2e_ms.count == result.itl_ms.count == 8
        assert len(origin.exchanges) == 10
        # One to ask for the model; it and one more carry all requests.
        assert origin.connections == 2
        assert [body["prompt"] for body in origin.bodies[:2]] == ["q0.0", "q1.0"]
        assert all(body["stream_options"] == {"include_usage": True} for body in origin.bodies)


async def test_sessions_say_all_that_was_said() -> None:
    async with running_origin() as origin:
        result = await _load(origin, 3, turns=3, endpoint=Endpoint.CHAT, max_concurrency=1, think_time_s=0.02)
        assert result.completed == 9
        last = origin.bodies[8]["messages"]
        assert [message["content"] for message in last] == ["q2.0", "xxxx", "q2.1", "xxxx", "q2.2"]
        of_first = [record for record in result.records if record.conversation == 0]
        for before, after in pairwise(of_first):
            assert after.sent_s - before.ended_s >= 0.02


async def test_an_open_loop_waits_for_no_answer_and_counts_from_the_schedule() -> None:
    release = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        if exchange.number == 19:
            release.set()
        await release.wait()
        await polite(exchange)

    async with running_origin(slow) as origin:
        result = await _load(origin, 20, arrivals=Arrivals(200.0), seed=3)
        assert result.completed == 20
        assert result.peak_concurrency == 20
        due = Arrivals(200.0).schedule(20, 3)
        by_number = sorted(result.records, key=lambda record: record.conversation)
        assert [record.due_s for record in by_number] == pytest.approx(due)
        assert all(record.late_ms >= 0 for record in by_number)
        first = by_number[0]
        assert first.ttft_ms is not None
        assert first.ttft_ms >= 1e3 * (due[19] - due[0])


async def test_waiting_for_a_place_is_latency_where_there_is_a_schedule() -> None:
    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(0.05)
        await polite(exchange)

    async with running_origin(slow) as origin:
        result = await _load(origin, 4, arrivals=Arrivals(1e5), max_concurrency=1)
        assert result.peak_concurrency == 1
        assert result.e2e_ms.maximum is not None
        assert result.e2e_ms.maximum >= 200
        assert result.late_ms is not None
        assert result.late_ms.maximum is not None
        assert result.late_ms.maximum >= 150


async def test_no_conversation_begins_after_the_duration() -> None:
    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(0.05)
        await polite(exchange)

    async with running_origin(slow) as origin:
        closed = await _load(origin, 100, max_concurrency=2, duration_s=0.12)
        assert 2 <= closed.completed == len(origin.exchanges) <= 6
        assert all(record.sent_s < 0.15 for record in closed.records)
        opened = await _load(origin, 100, arrivals=Arrivals(50.0), duration_s=0.2)
        assert opened.completed == len(Arrivals(50.0).schedule(100, 0, 0.2))
        assert not closed.used_up
        assert not opened.used_up
        assert (await _load(origin, 2, duration_s=5.0)).used_up


async def _half(exchange: Exchange) -> None:
    await exchange.raw(HEAD)
    await exchange.token()
    await exchange.token()


async def _cut(exchange: Exchange) -> None:
    await _half(exchange)
    exchange.writer.close()


async def _short(exchange: Exchange) -> None:
    await _half(exchange)
    await exchange.raw(b"0\r\n\r\n")


async def _refused(exchange: Exchange) -> None:
    await exchange.refuse(429, "slow down")


async def _refused_without_length(exchange: Exchange) -> None:
    await exchange.raw(b'HTTP/1.1 503 No\r\nConnection: close\r\n\r\n{"error": {"message": "too hot"}}')
    exchange.writer.close()


async def _broken(exchange: Exchange) -> None:
    await _half(exchange)
    await exchange.event({"error": {"message": "no memory", "code": 500}})
    await exchange.raw(b"0\r\n\r\n")


async def _garbage(exchange: Exchange) -> None:
    await exchange.raw(b"SMTP ready\r\n\r\n")


async def _no_stream(exchange: Exchange) -> None:
    await exchange.raw(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")


async def _nonsense(exchange: Exchange) -> None:
    await exchange.raw(HEAD)
    await exchange.event("<html>")


async def _error_as_a_chunk(exchange: Exchange) -> None:
    await _half(exchange)
    await exchange.event({"object": "error", "message": "no \x1b[31mmemory", "code": 500})
    await exchange.event("[DONE]")
    await exchange.raw(b"0\r\n\r\n")


async def _absurd_counts(exchange: Exchange) -> None:
    await exchange.raw(HEAD)
    await exchange.token()
    await exchange.finish(usage=(3, 10**400))


async def _hang_up(exchange: Exchange) -> None:
    exchange.writer.close()


MISBEHAVIOUR = {
    "cut": (_cut, "cut", "closed the connection"),
    "short": (_short, "cut", "ended before the answer did"),
    "refused": (_refused, "http_429", "slow down"),
    "refused without a length": (_refused_without_length, "http_503", "too hot"),
    "error in the stream": (_broken, "error_event", "no memory"),
    "error as a chunk": (_error_as_a_chunk, "error_event", "no \N{REPLACEMENT CHARACTER}[31mmemory"),
    "absurd counts": (_absurd_counts, "bad_answer", "no chunk"),
    "no HTTP": (_garbage, "bad_answer", "no HTTP"),
    "no stream": (_no_stream, "bad_answer", "no event stream"),
    "nonsense": (_nonsense, "bad_answer", "no chunk"),
    "hung up": (_hang_up, "cut", "closed the connection"),
}


@pytest.mark.parametrize("case", MISBEHAVIOUR)
async def test_what_goes_wrong_has_a_kind_and_harms_no_other_request(case: str) -> None:
    behaviour, kind, detail = MISBEHAVIOUR[case]

    async def every_second(exchange: Exchange) -> None:
        number = int(exchange.body["prompt"][1])
        await (behaviour if number % 2 else polite)(exchange)

    async with running_origin(every_second) as origin:
        result = await _load(origin, 8, max_concurrency=1)
    assert result.failures == {kind: 4}
    assert result.completed == 4
    assert result.output_tokens == 16
    failed = [record for record in result.records if record.failure is not None]
    assert all(detail in record.detail for record in failed)
    assert result.ttft_ms.percentiles[99.0] is None


@pytest.mark.parametrize("begun", [False, True])
async def test_a_server_that_never_answers_is_waited_for_no_longer_than_told(begun: bool) -> None:
    forever = asyncio.Event()

    async def silent(exchange: Exchange) -> None:
        if begun:
            await _half(exchange)
        await forever.wait()

    async with running_origin(silent) as origin:
        start = time.monotonic()
        result = await _load(origin, 3, timeout_s=0.3)
        assert time.monotonic() - start < 5
        assert result.failures == {"timeout": 3}
        assert all(250 <= record.e2e_ms < 5000 for record in result.records)
        forever.set()


async def test_the_rest_of_a_session_is_not_asked_after_a_failure() -> None:
    async def second_fails(exchange: Exchange) -> None:
        await (_refused if exchange.number == 1 else polite)(exchange)

    async with running_origin(second_fails) as origin:
        result = await _load(origin, 2, turns=4, max_concurrency=1)
        assert (result.completed, result.failures, result.skipped) == (5, {"http_429": 1}, 2)


async def test_a_strict_length_that_is_not_kept_is_a_failure() -> None:
    async def one_short(exchange: Exchange) -> None:
        await exchange.raw(HEAD)
        await exchange.token()
        await exchange.finish(usage=(3, 4 if exchange.number else 3))

    async with running_origin(one_short) as origin:
        lax = await _load(origin, 1)
        assert (lax.completed, lax.wrong_lengths) == (1, 1)
        origin.exchanges.clear()
        strict = await _load(origin, 2, strict_lengths=True, max_concurrency=1)
        assert strict.failures == {"length": 1}
        assert origin.bodies[0]["min_tokens"] == origin.bodies[0]["max_tokens"] == 4


async def test_a_server_may_close_a_connection_that_waits() -> None:
    async def once(exchange: Exchange) -> None:
        await polite(exchange)
        exchange.writer.close()

    async with running_origin(once) as origin:
        result = await _load(origin, 5, max_concurrency=1)
        assert result.failures == {}
        assert len(origin.exchanges) == 5


@pytest.mark.parametrize("noise", [b"\x00\x01\r\n\r\n", b"HTTP/1.1 408 Late\r\nContent-Length: 0\r\n\r\n"])
async def test_noise_after_an_answer_costs_a_connection_and_no_more(noise: bytes) -> None:
    async def noisy(exchange: Exchange) -> None:
        await exchange.raw(HEAD)
        await exchange.token()
        data = b'data: {"choices":[{"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
        await exchange.raw(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) + noise)

    async with running_origin(noisy) as origin:
        result = await _load(origin, 6, max_concurrency=2)
        assert (result.completed, result.failures) == (6, {})


async def test_without_usage_a_tokenizer_counts_or_nobody_does() -> None:
    async def no_usage(exchange: Exchange) -> None:
        await exchange.raw(HEAD)
        await exchange.token("a b")
        await exchange.token(" c")
        await exchange.finish()

    async with running_origin(no_usage) as origin:
        assert (await _load(origin, 2)).output_tokens is None
        plan = LoadPlan(target=Target(base_url=origin.address), conversations=_questions(2))
        counted = await run_load(plan, count_text=lambda text: len(text.split()))
        assert counted.output_tokens == 6


async def test_nothing_can_be_measured_without_a_server_or_a_warm_up_that_works() -> None:
    async with running_origin(_refused) as origin:
        with pytest.raises(BenchError, match="http_429: slow down"):
            await _load(origin, 3, warmup=2)
    plan = LoadPlan(target=Target(base_url="http://127.0.0.1:1"), conversations=_questions(1))
    with pytest.raises(BenchError, match="no answer from http://127"):
        await run_load(plan)


async def test_progress_is_told_to_the_end() -> None:
    told: list[Progress] = []
    async with running_origin() as origin:
        plan = LoadPlan(target=Target(base_url=origin.address), conversations=_questions(3))
        await run_load(plan, on_progress=told.append)
    assert (told[-1].total, told[-1].done, told[-1].failed, told[-1].running) == (3, 3, 0, 0)
    assert told[-1].chunks == 12


async def test_a_message_that_does_not_end_costs_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("catenary_apps.load.client._REST_S", 0.02)
    hung_up = asyncio.Event()

    async def endless(exchange: Exchange) -> None:
        await exchange.raw(HEAD)
        await exchange.token()
        if exchange.number > 0:
            # Nobody has closed the client yet.
            await hung_up.wait()
        await exchange.event("[DONE]")
        with suppress(ConnectionError):
            while exchange.number == 0:
                await exchange.token()
                await asyncio.sleep(0.005)
        hung_up.set()

    async with running_origin(endless) as origin:
        result = await _load(origin, 2, max_concurrency=1)
        assert (result.completed, result.failures) == (2, {})
