"""Clients that do not read, and crowds that hang up at once."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.support import Asked, Say, body, fast_prompt, serves_exactly, slow_prompt
from tests.support.e2e_stack import ProcessStack, until
from tests.support.http import Connection, request_bytes
from tests.support.token_stream import COMPLETIONS

CROWD = 200
LOST_INTEREST = 100_000 - 100


async def live(stack: ProcessStack) -> int:
    fleet = await stack.fleet()
    return fleet.live_sequences if fleet else -1


async def test_a_client_that_never_reads(stack: ProcessStack, say: Say) -> None:
    alone = Asked(stack, 200)
    await alone.exact()

    deaf = await Connection.to(stack.address)
    request = body(fast_prompt(), LOST_INTEREST, n=16, logprobs=5, stream=True)
    transport = deaf.writer.transport
    assert isinstance(transport, asyncio.Transport)
    transport.pause_reading()
    await deaf.send(request_bytes("POST", COMPLETIONS, request))

    async def running() -> bool:
        return await live(stack) == 16

    await until(running, "16 running sequences")
    neighbour = Asked(stack, 200)
    await neighbour.exact()

    async def dropped() -> bool:
        return await live(stack) == 0

    await until(dropped, "the end of what nobody reads", timeout_s=30)
    deaf.close()
    assert neighbour.stream.longest_gap_s < 5
    say(
        f"longest gap of a stream: alone {alone.stream.longest_gap_s * 1000:.0f} ms, beside a client "
        f"that never reads {neighbour.stream.longest_gap_s * 1000:.0f} ms"
    )


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.advisory("CVE-2026-9540")
async def test_a_crowd_that_hangs_up_at_once(stack: ProcessStack, stream: bool) -> None:
    neighbour = Asked(stack, 150)
    await neighbour.stream.begun()

    async def visit() -> None:
        connection = await Connection.to(stack.address)
        await connection.send(
            request_bytes("POST", COMPLETIONS, body(slow_prompt(), LOST_INTEREST, stream=stream))
        )
        connection.close()

    await asyncio.gather(*(visit() for _ in range(CROWD)))
    await neighbour.exact()
    await stack.idle()
    await serves_exactly(stack)


async def test_a_crowd_that_hangs_up_while_it_is_served(stack: ProcessStack) -> None:
    neighbour = Asked(stack, 300)
    await neighbour.stream.begun()
    crowd = []
    for _ in range(CROWD // 4):
        connection = await Connection.to(stack.address)
        crowd.append(connection)
        await connection.send(
            request_bytes("POST", COMPLETIONS, body(slow_prompt(), LOST_INTEREST, stream=True))
        )

    async def all_live() -> bool:
        return await live(stack) == len(crowd) + 1

    await until(all_live, "a crowd that is served")
    for connection in crowd:
        connection.writer.transport.abort()
    await neighbour.exact()
    await stack.idle()
