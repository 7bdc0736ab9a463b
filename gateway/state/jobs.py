"""Jobs in a table that several gateways share: leases, fencing, totals, and the loop that runs them."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiosqlite

from catenary.telemetry import get_logger, new_id
from gateway.errors import ApiError
from gateway.state.database import Database

_log = get_logger(__name__)

# A difference between the wall clock and the monotonic one that means that the former was set.
_STEP_S = 2.0
# Upper bound of a lease: an end that is further away was written before the clock was set back.
_FAR_S = 3600.0


def totals_schema(table: str, counter: str, added: str, changed: str, removed: str) -> str:
    """Return statements for a table `totals`, whose one row counts the rows of `table` and sums their bytes.

    Args:
        table: has a column `bytes`.
        counter: name of the column that counts.
        added, changed, removed: names of the triggers that keep the row.
    """
    return f"""
CREATE TABLE IF NOT EXISTS totals (one INTEGER PRIMARY KEY, {counter} INTEGER NOT NULL,
  bytes INTEGER NOT NULL);

INSERT OR IGNORE INTO totals VALUES (1, 0, 0);

CREATE TRIGGER IF NOT EXISTS {added} AFTER INSERT ON {table} BEGIN
  UPDATE totals SET {counter} = {counter} + 1, bytes = bytes + new.bytes;
END;

CREATE TRIGGER IF NOT EXISTS {changed} AFTER UPDATE OF bytes ON {table} BEGIN
  UPDATE totals SET bytes = bytes - old.bytes + new.bytes;
END;

CREATE TRIGGER IF NOT EXISTS {removed} AFTER DELETE ON {table} BEGIN
  UPDATE totals SET {counter} = {counter} - 1, bytes = bytes - old.bytes;
END"""


async def read_totals(db: aiosqlite.Connection) -> tuple[int, int]:
    """Return the number of rows and their bytes, as `totals_schema` keeps them."""
    ((_, count, size),) = await db.execute_fetchall("SELECT * FROM totals")
    return count, size


class LeaseLost(Exception):
    """Another gateway has claimed the job, or the job is gone: its former runner must stop."""


class LeaseClock:
    """Judge whether the leases of other gateways have run out.

    When the wall clock is set forward, all leases seem to have run out at once, though their holders live. So
    after a step of the clock no lease counts as run out until its holder has had time to renew it."""

    def __init__(self, lease_s: float, clock: Callable[[], float], elapsed: Callable[[], float]) -> None:
        """Start it. `lease_s`: length of each lease; `clock`: Unix time; `elapsed`: seconds of a monotonic
        clock."""
        self._lease_s = lease_s
        self._clock = clock
        self._elapsed = elapsed
        self._ahead = clock() - elapsed()
        self._trusted_from = elapsed()

    def end(self) -> float:
        """Return the end, in Unix time, of a lease that begins now."""
        return self._clock() + self._lease_s

    def distrust(self) -> None:
        """Count no lease as run out for the length of one: holders could not renew theirs."""
        self._trusted_from = self._elapsed() + self._lease_s

    def valid(self) -> tuple[float, float]:
        """Return the earliest and the latest end that the lease of a living process can have."""
        now, elapsed = self._clock(), self._elapsed()
        if abs(now - elapsed - self._ahead) > _STEP_S:
            self.distrust()
        self._ahead = now - elapsed
        if elapsed < self._trusted_from:
            return -math.inf, math.inf
        return now, now + _FAR_S


class Jobs:
    """Rows of a table with columns `id`, `status`, `runner` and `lease`, open until their status is final.

    An open job belongs to the gateway that `runner` names, until its lease runs out. A gateway takes a new
    name at each start, so the name is the epoch of a lease: `holding` fences later writes of a former runner.
    """

    def __init__(
        self,
        database: Database,
        table: str,
        *,
        final: Iterable[str],
        oldest: str,
        lease_s: float,
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        """Describe the table.

        Args:
            database: has the table.
            table: its name.
            final: statuses of jobs that have ended.
            oldest: the column by which jobs are claimed, smallest first.
            lease_s: seconds for which a gateway holds a job that it has claimed or renewed.
            clock: Unix time.
            elapsed: seconds of a monotonic clock.
        """
        names = ", ".join(f"'{status}'" for status in sorted(final))
        self.open = f"status NOT IN ({names})"
        """Condition of jobs that have not ended."""
        self.ended = f"status IN ({names})"
        """Condition of those that have."""
        self.leases = LeaseClock(lease_s, clock, elapsed)
        self.table = table
        self._database = database
        self._free = (
            f"SELECT id FROM {table} WHERE {self.open} "
            "AND (runner IS NULL OR lease NOT BETWEEN :from AND :to) "
            f"AND id NOT IN (SELECT value FROM json_each(:running)) ORDER BY {oldest} LIMIT 1"
        )

    async def claim(self, runner: str, running: Collection[str], columns: str) -> tuple[Any, ...] | None:
        """Claim the oldest open job that no living gateway holds, and return these columns of it.

        `running`: jobs of the runner, which it does not claim once more though their leases may have run out.
        """
        earliest, latest = self.leases.valid()
        free = {"from": earliest, "to": latest, "running": json.dumps(list(running))}
        # Reading takes no lock, and most of the time it finds nothing.
        if not await self._database.fetch(self._free, free):
            return None
        async with self._database.transaction() as db:
            rows = await db.execute_fetchall(
                f"UPDATE {self.table} SET runner = :runner, lease = :lease WHERE id = ({self._free}) "
                f"RETURNING {columns}",
                {**free, "runner": runner, "lease": self.leases.end()},
            )
        return next((tuple(row) for row in rows), None)

    async def renew(self, runner: str, job_ids: Collection[str]) -> dict[str, str]:
        """Renew the leases of the jobs that are open and held by the runner. Return their statuses by id."""
        async with self._database.transaction() as db:
            rows = await db.execute_fetchall(
                f"UPDATE {self.table} SET lease = ? WHERE runner = ? AND {self.open} "
                "AND id IN (SELECT value FROM json_each(?)) RETURNING id, status",
                (self.leases.end(), runner, json.dumps(list(job_ids))),
            )
        return {row[0]: row[1] for row in rows}

    @asynccontextmanager
    async def holding(self, runner: str, job_id: str, size: int = 0) -> AsyncIterator[aiosqlite.Connection]:
        """Open a transaction of the runner that holds a job, which renews its lease. Raise LeaseLost.

        `size`: see `Database.transaction`."""
        async with self._database.transaction(size) as db:
            cursor = await db.execute(
                f"UPDATE {self.table} SET lease = ? WHERE id = ? AND runner = ?",
                (self.leases.end(), job_id, runner),
            )
            if not cursor.rowcount:
                raise LeaseLost
            yield db

    async def release(self, runner: str) -> None:
        """Let other gateways claim the runner's jobs at once."""
        async with self._database.transaction() as db:
            await db.execute(
                f"UPDATE {self.table} SET runner = NULL WHERE runner = ? AND {self.open}", (runner,)
            )


class JobOwner:
    """Base of a class that decides which jobs a JobRunner runs."""

    def renewed(self, job_id: str, status: str) -> None:
        """Take the stored status of a running job, whose lease was renewed."""

    def ended(self, job_id: str) -> None:
        """Forget a job, whose task has ended."""

    async def claim_more(self) -> None:
        """Claim jobs, if there is room for more. Raise ApiError if the store does not answer."""

    async def sweep(self) -> None:
        """Delete what is too old. Raise ApiError if the store does not answer."""


class JobRunner:
    """The tasks of the jobs that this gateway holds, and the loop that renews their leases.

    A task whose job is no longer held is cancelled: the job was cancelled or deleted, here or at another
    gateway, or another gateway has claimed it."""

    def __init__(self, jobs: Jobs, owner: JobOwner, *, turn_s: float, sweep_s: float) -> None:
        """Prepare it. `turn_s`: seconds between two renewals; `sweep_s`: between two sweeps."""
        self.name = new_id("gateway-")
        """Runner of the jobs."""
        self._jobs = jobs
        self._owner = owner
        self._turn_s = turn_s
        self._sweep_s = sweep_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._woken = asyncio.Event()

    @property
    def running(self) -> Collection[str]:
        """Ids of the jobs that run."""
        return self._tasks.keys()

    def start(self, job_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a job that this gateway holds. `work` raises nothing but CancelledError."""
        task = asyncio.create_task(work, name=f"{self._jobs.table}-{job_id}")
        self._tasks[job_id] = task
        task.add_done_callback(lambda _: self._ended(job_id))

    def stop(self, job_id: str) -> None:
        """Cancel a job's task, if it runs here."""
        if (task := self._tasks.get(job_id)) is not None:
            task.cancel()

    def wake(self) -> None:
        """Begin the next turn now: there may be something to claim."""
        self._woken.set()

    async def run(self) -> None:
        """Renew, claim and sweep until cancelled. The tasks go on then: see `close`."""
        swept = -math.inf
        while True:
            try:
                if self._tasks:
                    await self._renew()
                await self._owner.claim_more()
                if time.monotonic() - swept >= self._sweep_s:
                    swept = time.monotonic()
                    await self._owner.sweep()
            except ApiError:
                # Its cause was logged where it happened. Other gateways could not renew their leases either.
                self._jobs.leases.distrust()
                _log.warning("store does not answer: leases not renewed", store=self._jobs.table)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._turn_s):
                    await self._woken.wait()
            self._woken.clear()

    async def close(self) -> None:
        """Cancel all tasks, wait for them, and release their jobs."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        with suppress(ApiError):
            await self._jobs.release(self.name)

    async def _renew(self) -> None:
        known = list(self._tasks)
        held = await self._jobs.renew(self.name, known)
        for job_id in known:
            # Some may have ended meanwhile.
            if job_id in self._tasks and job_id in held:
                self._owner.renewed(job_id, held[job_id])
            elif job_id not in held:
                self.stop(job_id)

    def _ended(self, job_id: str) -> None:
        self._tasks.pop(job_id, None)
        self._owner.ended(job_id)
