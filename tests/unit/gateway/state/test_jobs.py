"""Jobs of several gateways: who holds them, who takes them over, and databases of earlier versions."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import pytest

from gateway.batches import store as batches
from gateway.batches.store import BatchStore
from gateway.errors import ApiError
from gateway.responses import store as responses
from gateway.responses.objects import ResponseStatus
from gateway.responses.store import ResponseStore, StoreLimits
from gateway.state.database import Database
from gateway.state.jobs import JobOwner, JobRunner, Jobs, LeaseLost, read_totals, totals_schema
from tests.support.waiting import eventually

SURFACE = Path(__file__).parents[3] / "data" / "surface" / "state.json"
TABLE = """
CREATE TABLE IF NOT EXISTS jobs (
  id TEXT PRIMARY KEY, status TEXT NOT NULL, age INTEGER NOT NULL, bytes INTEGER NOT NULL DEFAULT 0,
  runner TEXT, lease REAL
);
"""


class World:
    """A table of jobs, and clocks that stand still."""

    def __init__(self, database: Database) -> None:
        self.now = 1000.0
        self.set = 0.0
        self.database = database
        self.jobs = Jobs(
            database,
            "jobs",
            final=("done",),
            oldest="age",
            lease_s=10,
            clock=lambda: self.now + self.set,
            elapsed=lambda: self.now,
        )

    async def add(self, *ids: str, status: str = "open") -> None:
        async with self.database.transaction() as db:
            for age, job_id in enumerate(ids):
                await db.execute("INSERT INTO jobs (id, status, age) VALUES (?, ?, ?)", (job_id, status, age))

    async def claim(self, runner: str, *running: str) -> str | None:
        row = await self.jobs.claim(runner, running, "id")
        return None if row is None else row[0]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    schema = TABLE + totals_schema("jobs", "count", "added", "changed", "removed")
    database = Database(tmp_path / "j.sqlite3", schema, 1)
    await database.open()
    yield World(database)
    await database.close()


async def test_a_job_is_claimed_once_and_the_oldest_first(world: World) -> None:
    await world.add("a", "b")
    await world.add("c", status="done")
    assert [await world.claim("g"), await world.claim("h"), await world.claim("h")] == ["a", "b", None]
    assert await world.jobs.renew("g", ["a", "b", "c"]) == {"a": "open"}
    world.now += 6
    await world.jobs.renew("g", ["a"])
    world.now += 6
    assert await world.claim("g", "a") == "b"
    assert await world.jobs.renew("h", ["b"]) == {}


async def test_a_former_runner_is_fenced(world: World) -> None:
    await world.add("a")
    await world.claim("g")
    async with world.jobs.holding("g", "a") as db:
        await db.execute("UPDATE jobs SET bytes = 5")
    world.now += 11
    assert await world.claim("h") == "a"
    with pytest.raises(LeaseLost):
        async with world.jobs.holding("g", "a") as db:
            await db.execute("UPDATE jobs SET bytes = 7")
    async with world.database.transaction() as db:
        assert await read_totals(db) == (1, 5)


async def test_a_released_job_is_claimed_at_once(world: World) -> None:
    await world.add("a", "b")
    await world.claim("g")
    await world.claim("h")
    world.jobs.leases.distrust()
    assert await world.claim("i") is None
    await world.jobs.release("g")
    assert await world.claim("i") == "a"


@pytest.mark.parametrize("step", [25 * 3600, -25 * 3600])
async def test_after_a_step_of_the_clock_holders_have_time_to_renew(world: World, step: float) -> None:
    await world.add("a", "b")
    await world.claim("g")
    await world.claim("h")
    world.set += step
    assert await world.claim("i") is None
    await world.jobs.renew("g", ["a"])
    world.now += 9
    await world.jobs.renew("g", ["a"])
    world.now += 2
    assert [await world.claim("i"), await world.claim("i")] == ["b", None]


class Owner(JobOwner):
    """Claims all that it can, and counts."""

    def __init__(self, world: World) -> None:
        self.runner = JobRunner(world.jobs, self, turn_s=0.005, sweep_s=1000)
        self.statuses: dict[str, str] = {}
        self.finished: list[str] = []
        self.swept = 0
        self.failing = False
        self.failures = 0
        self._world = world

    def renewed(self, job_id: str, status: str) -> None:
        self.statuses[job_id] = status

    def ended(self, job_id: str) -> None:
        self.finished.append(job_id)

    async def claim_more(self) -> None:
        if self.failing:
            self.failures += 1
            raise ApiError(503, "away")
        while (job_id := await self._world.claim(self.runner.name, *self.runner.running)) is not None:
            self.runner.start(job_id, asyncio.sleep(1000))

    async def sweep(self) -> None:
        self.swept += 1


async def test_a_runner_gives_up_what_it_no_longer_holds(world: World) -> None:
    await world.add("a", "b", "c", "d")
    owner = Owner(world)
    loop = asyncio.create_task(owner.runner.run())
    await eventually(lambda: owner.statuses == dict.fromkeys("abcd", "open"), "renewed leases")
    async with world.database.transaction() as db:
        await db.execute("UPDATE jobs SET status = 'done' WHERE id = 'a'")
        await db.execute("UPDATE jobs SET runner = 'other' WHERE id = 'b'")
        await db.execute("DELETE FROM jobs WHERE id = 'c'")
    await eventually(lambda: sorted(owner.finished) == ["a", "b", "c"], "cancelled tasks")
    assert set(owner.runner.running) == {"d"}
    loop.cancel()
    await asyncio.wait({loop})
    await owner.runner.close()
    assert (owner.finished[-1], owner.swept) == ("d", 1)
    assert [await world.claim("h"), await world.claim("h")] == ["d", None]


async def test_a_job_that_ends_while_its_lease_is_renewed(world: World) -> None:
    await world.add("a", "b")
    owner = Owner(world)
    renew, renewals = world.jobs.renew, 0

    async def slowly(runner: str, job_ids: Collection[str]) -> dict[str, str]:
        nonlocal renewals
        held = await renew(runner, job_ids)
        owner.runner.stop("a")
        await eventually(lambda: "a" in owner.finished, "its end")
        renewals += 1
        return held

    world.jobs.renew = slowly  # type: ignore[method-assign]
    loop = asyncio.create_task(owner.runner.run())
    await eventually(lambda: renewals > 2, "further turns")
    assert not loop.done()
    assert owner.statuses == {"b": "open"}
    loop.cancel()
    await asyncio.wait({loop})
    await owner.runner.close()


async def test_after_a_failure_of_the_store_others_have_time_to_renew(world: World) -> None:
    await world.add("a")
    assert await world.claim("h") == "a"
    owner = Owner(world)
    owner.failing = True
    loop = asyncio.create_task(owner.runner.run())
    await eventually(lambda: world.jobs.leases.valid()[0] == float("-inf"), "distrust")
    world.now += 15
    seen = owner.failures
    await eventually(lambda: owner.failures >= seen + 3, "three more turns that fail")
    owner.failing = False
    await eventually(lambda: owner.swept == 1, "a sweep")
    assert not owner.runner.running
    await world.jobs.renew("h", ["a"])
    loop.cancel()
    await asyncio.wait({loop})


def database_of_version_1(path: Path) -> sqlite3.Connection:
    """Make a database as version 1 wrote it: by the stored statements, not by those of the code."""
    stored = json.loads(SURFACE.read_text())[path.name]
    assert stored["version"] == 1
    old = sqlite3.connect(path)
    old.execute("PRAGMA auto_vacuum = 2")
    old.execute("PRAGMA journal_mode = WAL")
    for kind in ("CREATE TABLE", "CREATE"):
        for sql in stored["tables"].values():
            if sql.startswith("CREATE TABLE") == (kind == "CREATE TABLE"):
                old.execute(sql)
    old.execute("INSERT INTO totals VALUES (1, 0, 0)")
    old.execute("PRAGMA user_version = 1")
    return old


async def test_responses_of_version_1_are_read_and_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite3"
    old = database_of_version_1(path)
    columns = "id, owner, status, previous, bytes, used, runner, lease, items, response"
    rows = [
        ("done", "me", "completed", None, 9, 995.0, None, 995.0, b'[{"id": "i"}]', b'{"output": []}'),
        ("died", "me", "in_progress", None, 9, 995.0, "gateway-1", 999.0, b"[]", b"{}"),
        ("lives", "me", "queued", None, 9, 995.0, "gateway-2", 1005.0, b"[]", b"{}"),
    ]
    old.executemany(f"INSERT INTO responses ({columns}) VALUES ({', '.join('?' * 10)})", rows)
    old.execute("INSERT INTO item_places VALUES ('i', 'done', 0, 0)")
    old.execute("INSERT INTO streams VALUES ('died', 6, 2, 0)")
    old.execute("INSERT INTO events VALUES ('died', 0, ?)", (b"0\n\n1\n\n",))
    old.commit()
    old.close()

    database = Database(path, responses.SCHEMA, responses.VERSION)
    await database.open()
    try:
        limits = StoreLimits(9, 1000, 100.0)
        store = ResponseStore(database, limits, clock=lambda: 1000.0, elapsed=lambda: 0.0)
        found = await store.get("me", "done")
        assert found is not None
        assert (found.status, found.response) == (ResponseStatus.COMPLETED, b'{"output": []}')
        assert await store.items("me", ["i"]) == {"i": b'{"id":"i"}'}
        claim = await store.claim("gateway-3")
        assert claim is not None
        assert (claim[0].id, claim[1]) == ("died", 2)
        assert await store.claim("gateway-3", ["died"]) is None
        assert await store.jobs.renew("gateway-2", ["lives", "died"]) == {"lives": "queued"}
        stored = await store.events("me", "died", 0)
        assert stored is not None
        assert stored.events == [b"1\n\n"]
    finally:
        await database.close()


async def test_batches_of_version_1_are_read_and_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "batches.sqlite3"
    old = database_of_version_1(path)
    batch = {
        "id": "b",
        "endpoint": "/v1/completions",
        "input_file_id": "in",
        "completion_window": "1h",
        "status": "in_progress",
        "created_at": 990,
        "expires_at": 4590,
    }
    values = ("b", "me", "salt", "in_progress", 990.0, 4590.0, 100.0, "gateway-1", 999.0, 3, 1, 1)
    old.execute(
        f"INSERT INTO batches VALUES ({', '.join('?' * 16)})",
        (*values, "in", "out", "err", json.dumps(batch).encode()),
    )
    for file_id in ("in", "out", "err"):
        old.execute(
            "INSERT INTO files (id, owner, purpose, filename, created) VALUES (?, 'me', 'batch', 'x', 990)",
            (file_id,),
        )
    old.commit()
    old.close()

    database = Database(path, batches.SCHEMA, batches.VERSION)
    await database.open()
    try:
        store = BatchStore(database, lease_s=10, max_batches=9, clock=lambda: 1000.0, elapsed=lambda: 0.0)
        claim = await store.claim("gateway-2")
        assert claim is not None
        assert (claim.owner, claim.cache_salt, claim.output, claim.errors) == ("me", "salt", "out", "err")
        assert (claim.batch.id, claim.batch.request_counts.completed) == ("b", 1)
        await store.finalizing(claim)
        assert (await store.get("me", "b")).status.value == "finalizing"
        async with database.transaction() as db:
            assert await read_totals(db) == (3, 0)
    finally:
        await database.close()
