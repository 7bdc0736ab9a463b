"""Where a gateway keeps what outlives it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from catenary.runtime import StartRefused
from gateway.errors import ApiError
from gateway.state import Database, StateDirectory


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
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert StateDirectory.open(None, 8000).path is None


async def test_another_version_is_not_touched(tmp_path: Path) -> None:
    schema = "CREATE TABLE IF NOT EXISTS t (a)"
    old = Database(tmp_path / "x", schema, 1)
    await old.open()
    await old.close()
    with pytest.raises(StartRefused, match="another version"):
        await Database(tmp_path / "x", schema, 2).open()


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
