"""A batch's way through the store: every line once, whoever runs it and however often it begins again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from gateway.batches.files import FileLimits, FileStore
from gateway.batches.job import BatchJob, BatchLine, JobLimits, LineResult
from gateway.batches.objects import Batch, BatchStatus
from gateway.batches.store import SCHEMA, VERSION, BatchStore, ClaimedBatch, Outcome
from gateway.state.database import Database
from gateway.state.jobs import LeaseLost

URL = "/v1/completions"
LIMITS = JobLimits(1000, 10_000, 10_000, 3)
RunLine = Callable[[ClaimedBatch, BatchLine], Awaitable[LineResult]]


class World:
    """The stores, and a clock that stands still."""

    def __init__(self, database: Database) -> None:
        self.now = 1000.0
        self.database = database
        self.files = FileStore(database, FileLimits(100, 1 << 20), clock=self.clock)
        self.set = 0.0
        self.batches = BatchStore(
            database, lease_s=10, max_batches=10, clock=self.clock, elapsed=self.elapsed
        )

    def clock(self) -> float:
        return self.now + self.set

    def elapsed(self) -> float:
        return self.now

    async def begin(self, count: int, batch_id: str = "b") -> None:
        lines = [
            {"custom_id": f"c{index}", "method": "POST", "url": URL, "body": {"n": index}}
            for index in range(count)
        ]
        await self.files.begin("me", f"in-{batch_id}")
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        await self.files.append(f"in-{batch_id}", 0, data)
        await self.files.finish("me", f"in-{batch_id}", "x", None)
        batch = Batch(
            id=batch_id,
            endpoint=URL,
            input_file_id=f"in-{batch_id}",
            completion_window="1h",
            created_at=int(self.now),
            expires_at=int(self.now) + 3600,
        )
        await self.batches.add(ClaimedBatch(batch, "me", "", f"out-{batch_id}", f"err-{batch_id}"), 100.0)

    async def job(self, runner: str, run_line: RunLine, files: FileStore | None = None) -> BatchJob:
        claim = await self.batches.claim(runner)
        assert claim is not None
        return BatchJob(
            claim,
            batches=self.batches,
            files=files or self.files,
            run_line=run_line,
            limits=LIMITS,
            clock=self.clock,
            elapsed=self.elapsed,
        )

    async def renew(self, job: BatchJob, runner: str) -> None:
        """Renew the batch's lease, which the runner must hold, and tell the job its status."""
        job.renewed((await self.batches.jobs.renew(runner, [job.batch_id]))[job.batch_id])

    async def completed(self, count: int) -> None:
        """Wait until so many lines have been answered."""
        batch = await self.batches.get("me", "b")
        while batch.request_counts.completed < count:
            await asyncio.sleep(0.005)
            batch = await self.batches.get("me", "b")

    async def lines(self, file_id: str | None) -> list[str]:
        if file_id is None:
            return []
        text = b"".join([piece async for piece in self.files.content(file_id)]).decode()
        return [json.loads(line)["custom_id"] for line in text.splitlines()]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    database = Database(tmp_path / "b.sqlite3", SCHEMA, VERSION)
    await database.open()
    yield World(database)
    await database.close()


async def answer(_claim: ClaimedBatch, line: BatchLine) -> LineResult:
    status = 400 if line.body["n"] % 3 == 2 else 200
    return LineResult(status, "req", b"{}")


async def never(_claim: ClaimedBatch, _line: BatchLine) -> LineResult:
    await asyncio.Event().wait()
    raise AssertionError


async def test_results_are_in_the_order_of_the_input(world: World) -> None:
    await world.begin(7)

    async def backwards(claim: ClaimedBatch, line: BatchLine) -> LineResult:
        await asyncio.sleep(0.01 if line.body["n"] % 2 else 0)
        return await answer(claim, line)

    await (await world.job("g", backwards)).run()
    batch = await world.batches.get("me", "b")
    assert batch.status is BatchStatus.COMPLETED
    assert await world.lines(batch.output_file_id) == ["c0", "c1", "c3", "c4", "c6"]
    assert await world.lines(batch.error_file_id) == ["c2", "c5"]
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (7, 5, 2)
    assert batch.in_progress_at == batch.finalizing_at == batch.completed_at == 1000


async def test_a_job_that_ends_anywhere_is_gone_on_with(world: World) -> None:
    await world.begin(8)
    ran: list[str] = []

    async def three(claim: ClaimedBatch, line: BatchLine) -> LineResult:
        if len(ran) >= 3:
            await asyncio.Event().wait()
        ran.append(line.custom_id)
        return await answer(claim, line)

    work = asyncio.create_task((await world.job("g", three)).run())
    await world.completed(2)
    work.cancel()
    await asyncio.wait({work})
    assert await world.batches.claim("h") is None
    world.now += 11
    ran_before = set(ran)
    ran.clear()

    async def rest(claim: ClaimedBatch, line: BatchLine) -> LineResult:
        ran.append(line.custom_id)
        return await answer(claim, line)

    await (await world.job("h", rest)).run()
    batch = await world.batches.get("me", "b")
    found = await world.lines(batch.output_file_id) + await world.lines(batch.error_file_id)
    assert sorted(found) == [f"c{index}" for index in range(8)]
    assert len(ran) <= 8 - 2
    assert ran_before | set(ran) == set(found)
    assert batch.request_counts.completed + batch.request_counts.failed == 8


async def test_who_lost_a_batch_writes_nothing_more(world: World) -> None:
    await world.begin(2)
    old = await world.job("g", never)
    claim = old.claim
    world.now += 11
    await (await world.job("h", answer)).run()
    for late in (
        world.batches.started(claim, 2),
        world.batches.record(claim, [Outcome(1, False, b"{}")]),
        world.batches.finalizing(claim),
        world.batches.finish(claim, BatchStatus.COMPLETED),
    ):
        with pytest.raises(LeaseLost):
            await late
    assert await world.batches.jobs.renew("g", ["b"]) == {}
    batch = await world.batches.get("me", "b")
    assert await world.lines(batch.output_file_id) == ["c0", "c1"]


@pytest.mark.parametrize("end", [BatchStatus.EXPIRED, BatchStatus.CANCELLED])
async def test_lines_that_were_not_run_say_why(world: World, end: BatchStatus) -> None:
    await world.begin(5)

    async def one(claim: ClaimedBatch, line: BatchLine) -> LineResult:
        return await (answer if line.body["n"] == 0 else never)(claim, line)

    job = await world.job("g", one)
    work = asyncio.create_task(job.run())
    await world.completed(1)
    if end is BatchStatus.EXPIRED:
        await world.renew(job, "g")
        world.now += 3600
        assert await world.batches.jobs.renew("g", ["b"]) == {"b": "in_progress"}
    else:
        assert (await world.batches.cancel("me", "b")).status is BatchStatus.CANCELLING
    await world.renew(job, "g")
    await work
    batch = await world.batches.get("me", "b")
    assert batch.status is end
    assert await world.lines(batch.output_file_id) == ["c0"]
    assert await world.lines(batch.error_file_id) == ["c1", "c2", "c3", "c4"]


@pytest.mark.parametrize("step", [25 * 3600, -25 * 3600])
async def test_a_clock_that_is_set_expires_nothing_that_runs(world: World, step: int) -> None:
    await world.begin(2)
    go = asyncio.Event()

    async def later(claim: ClaimedBatch, line: BatchLine) -> LineResult:
        await go.wait()
        return await answer(claim, line)

    job = await world.job("g", later)
    work = asyncio.create_task(job.run())
    world.set += step
    assert await world.batches.claim("g", [job.batch_id]) is None
    assert await world.batches.claim("h") is None
    await world.renew(job, "g")
    go.set()
    await work
    assert (await world.batches.get("me", "b")).status is BatchStatus.COMPLETED


async def test_a_batch_of_a_gateway_that_died_is_taken_over_after_the_clock_was_set(world: World) -> None:
    await world.begin(1)
    await world.job("g", never)
    world.set -= 25 * 3600
    assert await world.batches.claim("h") is None
    world.now += 11
    assert await world.batches.claim("h", ["b"]) is None
    assert await world.batches.claim("h")


async def test_a_batch_cancelled_before_it_began(world: World) -> None:
    await world.begin(2)
    await world.batches.cancel("me", "b")
    await (await world.job("g", never)).run()
    batch = await world.batches.get("me", "b")
    assert (batch.status, batch.request_counts.failed) == (BatchStatus.CANCELLED, 0)


async def test_a_cancel_does_not_wait_for_the_rest_of_the_file(world: World) -> None:
    await world.begin(2)
    read = asyncio.Event()

    class Endless(FileStore):
        async def content(self, file_id: str) -> AsyncIterator[bytes]:
            while True:
                await asyncio.sleep(0)
                read.set()
                yield b" "

    job = await world.job("g", never, Endless(world.database, FileLimits(1, 1)))
    work = asyncio.create_task(job.run())
    await read.wait()
    await world.batches.cancel("me", "b")
    await world.renew(job, "g")
    await work
    assert (await world.batches.get("me", "b")).status is BatchStatus.CANCELLED


async def test_a_batch_that_expired_before_it_began_says_so_of_each_line(world: World) -> None:
    await world.begin(2)
    world.now += 3600
    await (await world.job("g", never)).run()
    batch = await world.batches.get("me", "b")
    assert (batch.status, batch.request_counts.failed) == (BatchStatus.EXPIRED, 2)


async def test_what_is_kept_ends_some_time(world: World) -> None:
    await world.begin(1)
    await (await world.job("g", answer)).run()
    batch = await world.batches.get("me", "b")
    assert batch.output_file_id is not None
    assert (await world.files.get("me", batch.output_file_id)).expires_at == 1100
    await world.files.begin("me", "half")
    world.now += 101
    await world.files.sweep(100.0)
    assert [
        file.id
        for file in await world.files.listed("me", purpose=None, limit=9, after=None, newest_first=True)
    ] == ["in-b"]
    await world.batches.sweep()
    assert await world.batches.get("me", "b")
    world.now += 3600
    await world.batches.sweep()
    assert await world.batches.listed("me", limit=9, after=None) == []
