"""When the heap is trimmed."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from catenary.memory import SLACK_BYTES, find_trim, give_memory_back, resident_bytes
from tests.support.virtual_time import virtual_time

MIB = 1 << 20


class Process:
    """Its size, what of it a trim finds, and how often it was trimmed."""

    def __init__(self) -> None:
        self.size = 60 * MIB
        self.free = 0
        self.trims = 0

    def resident(self) -> int:
        return self.size

    def trim(self) -> None:
        self.trims += 1
        self.size -= self.free
        self.free = 0


async def watched(process: Process, *, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await give_memory_back(process.trim, process.resident, check_s=0.01, longest_wait_s=10)


@virtual_time
async def test_a_process_that_does_not_grow_is_left_alone() -> None:
    process = Process()
    watching = asyncio.create_task(watched(process, seconds=0.1))
    await asyncio.sleep(0)
    process.size += SLACK_BYTES - MIB
    await watching
    assert process.trims == 0


@virtual_time
async def test_what_is_free_after_a_flood_is_given_back() -> None:
    process = Process()
    watching = asyncio.create_task(watched(process, seconds=0.2))
    await asyncio.sleep(0)
    process.size += 900 * MIB
    process.free = 900 * MIB
    await watching
    assert process.size == 60 * MIB
    assert process.trims == 1


@virtual_time
async def test_trims_that_find_nothing_become_rare() -> None:
    process = Process()
    watching = asyncio.create_task(watched(process, seconds=0.5))
    await asyncio.sleep(0)
    process.size += 900 * MIB
    await watching
    # After 0.01, 0.03, 0.07, 0.15, 0.31 seconds.
    assert process.trims == 5


async def test_this_process_can_be_measured_and_trimmed() -> None:
    assert resident_bytes() > MIB
    trim = find_trim()
    if trim is not None:
        trim()


async def test_without_proc_there_is_nothing_to_do() -> None:
    def resident() -> int:
        raise FileNotFoundError

    async with asyncio.timeout(1):
        await give_memory_back(lambda: None, resident)
