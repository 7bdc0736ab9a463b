"""A gateway whose disk is full or read-only: what it accepted stays, and people can read and delete."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from catenary.runtime import StartRefused
from gateway.batches.files import FileLimits, FileStore
from gateway.batches.store import SCHEMA, VERSION
from gateway.errors import ApiError
from gateway.state.database import Database, Disk
from tests.support.batches import ended, line, results, started
from tests.support.gateway import Stack, saying, script
from tests.support.http import call
from tests.support.small_disk import SmallDisk
from tests.support.stack_fixtures import StartStack

MIB = 1 << 20
RESPONSES = "/v1/responses"
MountDisk = Callable[..., SmallDisk]


@asynccontextmanager
async def client_of(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="k", max_retries=0) as client:
        yield client


@asynccontextmanager
async def database_in(directory: Path) -> AsyncIterator[Database]:
    database = Database(directory / "batches.sqlite3", SCHEMA, VERSION)
    await database.open()
    try:
        yield database
    finally:
        await database.close()


def files_in(database: Database) -> FileStore:
    return FileStore(database, FileLimits(1000, 1 << 40))


async def stored(files: FileStore, file_id: str, size: int) -> None:
    await files.begin("me", file_id)
    for number, start in enumerate(range(0, size, 1 << 18)):
        await files.append(file_id, number, bytes(min(1 << 18, size - start)))
    await files.finish("me", file_id, "x", None)


async def ids(files: FileStore) -> list[str]:
    found = await files.listed("me", purpose=None, limit=100, after=None, newest_first=False)
    return [file.id for file in found]


async def many_small_ones(files: FileStore) -> None:
    for number in range(1000):
        await files.begin("me", f"f{number}")
        await files.append(f"f{number}", 0, bytes(20_000))


async def stored_on_a_full_disk(disk: SmallDisk, files: FileStore) -> None:
    # The first one may be what gives the log's room back.
    for name in ("more", "most"):
        disk.fill()
        await stored(files, name, MIB)


async def refused(files: FileStore, file_id: str, size: int) -> None:
    with pytest.raises(ApiError) as full:
        await stored(files, file_id, size)
    assert (full.value.status, full.value.code) == (507, "disk_full")
    await files.discard(file_id)


async def test_an_upload_that_does_not_fit_leaves_room_for_others(small_disk: MountDisk) -> None:
    disk = small_disk(3 * MIB)
    async with database_in(disk.path) as database:
        files = files_in(database)
        before = disk.free
        await refused(files, "big", 6 * MIB)
        assert disk.free > before - MIB // 2
        with pytest.raises(ApiError, match="disk is full"):
            await files.begin("me", "big", 6 * MIB)
        await stored(files, "small", 200)
    async with database_in(disk.path) as database:
        assert await ids(files_in(database)) == ["small"]


async def test_what_is_there_can_be_read_and_deleted_on_a_full_disk(small_disk: MountDisk) -> None:
    disk = small_disk(16 * MIB)
    async with database_in(disk.path) as database:
        files = files_in(database)
        for name in ("a", "b", "c"):
            await stored(files, name, 2 * MIB)
        with pytest.raises(ApiError, match="disk is full"):
            await stored_on_a_full_disk(disk, files)
        disk.fill()
        assert sum([len(piece) async for piece in files.content("a")]) == 2 * MIB
        await files.delete("me", "a")
        assert disk.free > MIB // 2
        disk.fill()
        await files.delete("me", "b")
        disk.fill()
    # Closed and opened on a full disk.
    async with database_in(disk.path) as database:
        files = files_in(database)
        assert "c" in await ids(files)
        await files.delete("me", "c")
        disk.relieve()
        await stored(files, "d", 2 * MIB)
        assert (await ids(files))[-1] == "d"


async def test_many_writes_on_a_disk_that_others_fill_do_not_wedge_it(small_disk: MountDisk) -> None:
    disk = small_disk(12 * MIB)
    async with database_in(disk.path) as database:
        files = files_in(database)
        await stored(files, "a", MIB)
        disk.fill(leave=300_000)
        with pytest.raises(ApiError, match="disk is full"):
            await many_small_ones(files)
        disk.fill()
    async with database_in(disk.path) as database:
        await files_in(database).delete("me", "a")
        await stored(files_in(database), "b", 200_000)


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from gateway.batches.files import FileLimits, FileStore
from gateway.batches.store import SCHEMA, VERSION
from gateway.state.database import Database, Disk

async def main():
    database = Database(Path(sys.argv[1]) / "batches.sqlite3", SCHEMA, VERSION)
    await database.open()
    files = FileStore(database, FileLimits(1000, 1 << 40))
    await files.begin("me", "done")
    await files.append("done", 0, bytes(1 << 20))
    await files.finish("me", "done", "x", None)
    await files.begin("me", "half")
    for number in range(20):
        await files.append("half", number, bytes(60_000))
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_a_gateway_killed_at_an_upload_starts_on_a_full_disk(small_disk: MountDisk) -> None:
    disk = small_disk(6 * MIB)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, str(disk.path))
    assert await process.wait() == -signal.SIGKILL
    disk.fill()
    async with database_in(disk.path) as database:
        files = files_in(database)
        assert await ids(files) == ["done"]
        assert sum([len(piece) async for piece in files.content("done")]) == MIB
        disk.fill()
        await files.sweep(-1.0)
        assert disk.free > MIB
        await files.delete("me", "done")
        assert disk.free > 2 * MIB


async def test_a_start_on_a_full_disk_without_a_reserve_names_the_disk(small_disk: MountDisk) -> None:
    disk = small_disk(MIB)
    disk.fill()
    with pytest.raises(StartRefused, match=f"the disk of {disk.path} is full: batches.sqlite3"):
        await Database(disk.path / "batches.sqlite3", SCHEMA, VERSION).open()


async def test_a_disk_that_becomes_read_only_is_read(small_disk: MountDisk) -> None:
    disk = small_disk(8 * MIB)
    async with database_in(disk.path) as database:
        await stored(files_in(database), "a", MIB)
    with disk.read_only(), pytest.raises(StartRefused, match=r"batches.sqlite3 cannot be read and written"):
        await Database(disk.path / "batches.sqlite3", SCHEMA, VERSION).open()
    async with database_in(disk.path) as database:
        assert await ids(files_in(database)) == ["a"]


async def test_a_gateway_on_a_small_disk(start_stack: StartStack, small_disk: MountDisk) -> None:
    disk = small_disk(3 * MIB)
    stack = await start_stack(state_dir=disk.path)
    async with client_of(stack) as client:
        for _ in range(3):
            with pytest.raises(openai.InternalServerError) as full:
                await client.files.create(file=("big.jsonl", b"x" * (6 * MIB)), purpose="batch")
            assert (full.value.status_code, full.value.code) == (507, "disk_full")
        batch = await ended(client, await started(client, [line("a", {"prompt": "x", "max_tokens": 2})]))
        assert batch.status == "completed"
        made: Any = await client.responses.create(model="tiny", input="hi", max_output_tokens=2)
        assert made.store
    await stack.restart_gateway()
    async with client_of(stack) as client:
        assert await results(client, batch.output_file_id)
        assert (await client.responses.retrieve(made.id)).id == made.id


async def test_stored_responses_on_a_full_disk(start_stack: StartStack, small_disk: MountDisk) -> None:
    disk = small_disk(8 * MIB)
    stack = await start_stack(state_dir=disk.path)
    first, second = [
        (await stack.post(RESPONSES, {"input": "hi", "max_output_tokens": 2})).json() for _ in range(2)
    ]
    disk.fill()
    late = await stack.post(
        RESPONSES, {"input": "hi" * 100_000, "max_output_tokens": 2, "truncation": "auto"}
    )
    if late.status == 200:
        assert late.json()["store"] is False
    assert (await stack.get(f"{RESPONSES}/{first['id']}")).json() == first
    more = {"input": "on", "previous_response_id": first["id"], "max_output_tokens": 2, "store": False}
    assert (await stack.post(RESPONSES, more)).status == 200
    await stack.restart_gateway()
    assert (await stack.get(f"{RESPONSES}/{second['id']}")).json() == second
    assert (await call(stack.address, "DELETE", f"{RESPONSES}/{first['id']}", None)).status == 200
    assert (await stack.get(f"{RESPONSES}/{first['id']}")).status == 404


async def test_a_background_response_outlives_a_full_disk(
    start_stack: StartStack, small_disk: MountDisk
) -> None:
    disk = small_disk(8 * MIB)
    stack = await start_stack(script(saying("hello"), step_delay_ms=20), state_dir=disk.path, lease_s=1.0)
    made = await stack.post(RESPONSES, {"input": "x" * 100, "background": True})
    path = f"{RESPONSES}/{made.json()['id']}"
    # Nothing can be written, with or without a reserve.
    disk.fill()
    Disk(disk.path).give_up()
    disk.fill()
    await stack.idle()
    # Its lease, which cannot be renewed, has run out when there is room again.
    await asyncio.sleep(1.5)
    disk.relieve()

    seen = made.json()
    async with asyncio.timeout(20):
        while seen["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.05)
            seen = (await stack.get(path)).json()
    assert (seen["status"], seen["error"]) == ("completed", None)


async def test_a_batch_outlives_a_full_disk(start_stack: StartStack, small_disk: MountDisk) -> None:
    disk = small_disk(8 * MIB)
    lines = [line(f"n{index}", {"prompt": f"{index}", "max_tokens": 5}) for index in range(40)]
    stack = await start_stack(
        script(step_delay_ms=10), state_dir=disk.path, batch_lines_at_work=2, lease_s=1.0
    )
    async with client_of(stack) as client:
        batch = await started(client, lines)
        disk.fill()
        await asyncio.sleep(1)
        assert (await client.batches.retrieve(batch.id)).status in ("validating", "in_progress", "completed")
        disk.relieve()
        batch = await ended(client, batch)
        assert batch.status == "completed"
        assert sorted(await results(client, batch.output_file_id)) == sorted(
            str(item["custom_id"]) for item in lines
        )
