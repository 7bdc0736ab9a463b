"""Where a gateway keeps what outlives it."""

from __future__ import annotations

import errno
import sqlite3
import stat
from pathlib import Path

import pytest

from catenary.runtime import StartRefused
from gateway.errors import ApiError
from gateway.state import database as database_module
from gateway.state.database import Database, Disk, StateDirectory


def test_each_port_has_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = StateDirectory.open(None, 8000)
    assert found.path == tmp_path / "catenary" / "gateway-8000"
    assert stat.S_IMODE(found.path.stat().st_mode) == 0o700
    found.close()
    assert found.path.is_dir()


def test_port_0_has_a_temporary_one() -> None:
    found = StateDirectory.open(None, 0)
    assert found.path is not None
    assert found.path.is_dir()
    found.close()
    assert not found.path.exists()


def test_a_directory_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartRefused, match=r"--state-dir: .* cannot be written"):
        StateDirectory.open(tmp_path / "file" / "x", 8000)
    with pytest.raises(StartRefused, match="--state-dir: ~nobody-of-that-name: there is no such user"):
        StateDirectory.open(Path("~nobody-of-that-name/x"), 8000)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert StateDirectory.open(None, 8000).path is None


async def test_another_version_is_not_touched(tmp_path: Path) -> None:
    schema = "CREATE TABLE IF NOT EXISTS t (a)"
    old = Database(tmp_path / "x", schema, 1)
    await old.open()
    await old.close()
    with pytest.raises(StartRefused, match="another version"):
        await Database(tmp_path / "x", schema, 2).open()


async def test_the_files_are_for_this_user_alone_wherever_they_are(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    # As an earlier version left them.
    (shared / "x").touch(mode=0o644)
    database = Database(shared / "x", "CREATE TABLE IF NOT EXISTS t (a)", 1)
    await database.open()
    async with database.transaction() as db:
        await db.execute("INSERT INTO t VALUES (1)")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in shared.iterdir()}
    await database.close()
    assert modes == {"x": 0o600, "x-wal": 0o600, "x-shm": 0o600, "reserve": 0o600}


def test_a_directory_that_others_may_list_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o755)
    StateDirectory.open(tmp_path, 8000)
    assert "others may list the state directory" in capsys.readouterr().out
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


async def test_what_is_deleted_is_given_back_to_the_disk(tmp_path: Path) -> None:
    database = Database(tmp_path / "x", "CREATE TABLE IF NOT EXISTS t (a)", 1)
    await database.open()
    async with database.transaction() as db:
        await db.execute("INSERT INTO t VALUES (zeroblob(10000000))")
    statements: list[str] = []
    async with database.transaction() as db:
        await db.set_trace_callback(statements.append)
    await database.essential(lambda db: db.execute_fetchall("DELETE FROM t"))
    assert (tmp_path / "x").stat().st_size < 100_000
    # 2442 pages, 1024 at a time.
    assert sum("incremental_vacuum" in statement for statement in statements) == 3
    await database.close()


async def test_a_disk_without_room_refuses_large_things_before_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(tmp_path / "x", "CREATE TABLE IF NOT EXISTS t (a)", 1)
    await database.open()
    monkeypatch.setattr(Disk, "free", lambda _: 1 << 20)
    with pytest.raises(ApiError) as refused:
        await database.check_room(1 << 20)
    assert (refused.value.status, refused.value.code) == (507, "disk_full")
    with pytest.raises(ApiError):
        async with database.transaction(1 << 20):
            pass
    await database.check_room(100_000)
    async with database.transaction(100_000):
        pass
    await database.close()


async def test_a_store_that_cannot_be_measured_does_not_answer(tmp_path: Path) -> None:
    database = Database(tmp_path / "x", "CREATE TABLE IF NOT EXISTS t (a)", 1)
    await database.open()
    async with database.transaction() as db:
        await db.execute("INSERT INTO t VALUES (1)")
    other = sqlite3.connect(tmp_path / "x")
    other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    other.close()
    # What stands in place of the database is none.
    (tmp_path / "x").write_bytes(b"\xff" * 8192)
    with pytest.raises(ApiError) as unmeasured:
        await database.check_room(1 << 20)
    assert (unmeasured.value.status, unmeasured.value.code) == (503, "store_unavailable")
    with pytest.raises(ApiError) as refused:
        async with database.transaction(1 << 20):
            pass
    assert (refused.value.status, refused.value.code) == (503, "store_unavailable")
    await database.close()


async def test_a_disk_that_cannot_be_measured_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Disk) -> int:
        raise OSError(errno.EIO, "statvfs")

    database = Database(tmp_path / "x", "CREATE TABLE IF NOT EXISTS t (a)", 1)
    await database.open()
    monkeypatch.setattr(Disk, "free", fails)
    await database.check_room(1 << 20)
    async with database.transaction(1 << 20) as db:
        await db.execute("INSERT INTO t VALUES (1)")
    assert await database.fetch("SELECT a FROM t") == [(1,)]
    await database.close()


async def test_who_waits_too_long_for_a_slow_disk_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "_ANSWER_S", 0.01)
    database = Database(tmp_path / "x", "CREATE TABLE IF NOT EXISTS t (a)", 1)
    await database.open()
    async with database.transaction():
        with pytest.raises(ApiError) as late:
            await database.fetch("SELECT 1")
    assert late.value.code == "store_unavailable"
    assert await database.fetch("SELECT 1") == [(1,)]
    await database.close()


async def test_what_does_not_count_together_does_not_count(tmp_path: Path) -> None:
    database = Database(tmp_path / "x", "CREATE TABLE IF NOT EXISTS t (a)", 1)
    await database.open()

    async def broken_off() -> None:
        async with database.transaction() as db:
            await db.execute("INSERT INTO t VALUES (1)")
            raise KeyError

    with pytest.raises(KeyError):
        await broken_off()
    async with database.transaction() as db:
        await db.execute("INSERT INTO t VALUES (2)")
    assert await database.fetch("SELECT a FROM t") == [(2,)]
    await database.close()
    with pytest.raises(ApiError) as closed:
        await database.fetch("SELECT a FROM t")
    assert (closed.value.status, closed.value.code) == (503, "store_unavailable")
    with pytest.raises(ApiError):
        async with database.transaction():
            pass
