from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from catenary.runtime import StartRefused
from catenary_apps.cli.router_options import RouterOptions, RoutersOptions
from catenary_apps.cli.routers import find_router, find_routers
from catenary_apps.cli.runtime_directory import CLIENT_SECRET_ENV, LOCK_NAME, RuntimeDirectory, remove_stale


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_runtime_directory_is_private_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLIENT_SECRET_ENV, "chosen")
    directory = RuntimeDirectory.create()
    try:
        assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
        for file in (directory.client_secret, directory.engine_secret):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert directory.client_secret.read_text().strip() == "chosen"
        assert len(directory.engine_secret.read_text().strip()) >= 32
    finally:
        directory.remove()
    assert not directory.path.exists()


def test_commands_find_all_routers_of_the_run_on_this_machine() -> None:
    access = RoutersOptions()
    with pytest.raises(StartRefused, match="no catenary up of yours runs"):
        find_routers(access)
    directory = RuntimeDirectory.create()
    try:
        # Before it listens, a single one is looked for.
        assert [target.address for target in find_routers(access)] == [directory.socket("router")]
        names = [f"router-{number}" for number in range(11)]
        for name in (*names, "tokenizer-0"):
            (directory.path / f"{name}.sock").touch()
        assert [target.address for target in find_routers(access)] == list(map(directory.socket, names))
        assert find_router(RouterOptions()).address == directory.socket("router-0")
        another = RuntimeDirectory.create()
        another.describe("port 8000, smollm2, since 12:01:07")
        try:
            with pytest.raises(StartRefused, match="more than one catenary up") as refused:
                find_routers(access)
            assert f"{another.socket('router')} (port 8000, smollm2, since 12:01:07)" in str(refused.value)
        finally:
            another.remove()
    finally:
        directory.remove()


HOLDER = (
    "import os, time\n"
    "from catenary_apps.cli.runtime_directory import RuntimeDirectory\n"
    "kept = RuntimeDirectory.create()\n"
    "print(kept.path, flush=True)\ntime.sleep(600)"
)


def test_a_start_removes_what_killed_supervisors_left_and_nothing_of_living_ones(temporary: Path) -> None:
    environment = os.environ | {"TMPDIR": str(temporary)}

    def hold() -> tuple[subprocess.Popen[str], Path]:
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert holder.stdout is not None
        return holder, Path(holder.stdout.readline().strip())

    (killed, left), (living, kept) = hold(), hold()
    try:
        assert (kept / LOCK_NAME).read_text() == f"{living.pid}\n"
        killed.send_signal(signal.SIGKILL)
        killed.wait(10)
        assert (left / "client.secret").exists()
        directory = RuntimeDirectory.create()
        assert sorted(temporary.iterdir()) == sorted([kept, directory.path])
        # Its own neither, although the same process asks.
        remove_stale()
        assert directory.engine_secret.exists()
        directory.remove()
    finally:
        for process in (killed, living):
            process.kill()
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()


def test_what_is_no_runtime_directory_stays(temporary: Path) -> None:
    plain, open_to_all = temporary / "catenary-plain", temporary / "catenary-open"
    plain.mkdir(0o700)
    open_to_all.mkdir(0o755)
    (open_to_all / LOCK_NAME).touch()
    target = temporary / "elsewhere"
    target.mkdir(0o700)
    (target / LOCK_NAME).touch()
    (temporary / "catenary-link").symlink_to(target)
    (temporary / "catenary-file").touch()
    before = sorted(temporary.rglob("*"))
    remove_stale()
    assert sorted(temporary.rglob("*")) == before
