from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from catenary.directories import NoHomeError, cache_directory, expanded, forbids_code, home_directory
from catenary.runtime import StartRefused
from catenary_apps.cli.runtime_directory import check_temporary_directory
from catenary_apps.up.run import cache_directory as cache_of_up
from catenary_apps.up.run import require_writable
from gateway.state.database import StateDirectory
from services.engine.device import DeviceError
from services.engine.device.hpu import RecipeCache
from services.engine.device.hpu.open_card import use_recipe_cache
from services.engine.model import ModelError, default_cache_dir, prepare_model, resolve_source


@pytest.mark.parametrize(("flag", "forbids"), [(os.ST_NOEXEC, True), (os.ST_RDONLY, False)])
def test_where_code_cannot_be_loaded_is_known_of_a_directory_that_is_not_there_yet(
    flag: int, forbids: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Path] = []

    def statvfs(path: Path) -> os.statvfs_result:
        asked.append(path)
        if path != tmp_path:
            raise FileNotFoundError(path)
        return os.statvfs_result((*(0,) * 8, flag, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert forbids_code(tmp_path / "cache" / "native") is forbids
    assert asked == [tmp_path / "cache" / "native", tmp_path / "cache", tmp_path]


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user number that the passwd file does not know, and no HOME."""

    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "CATENARY_CACHE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("home", ["", None])
def test_an_empty_home_is_none(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    assert home_directory() == Path(pwd.getpwuid(os.getuid()).pw_dir)
    assert expanded("~/a") == home_directory() / "a"


def test_paths_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.delenv("CATENARY_CACHE", raising=False)
    assert [expanded(text) for text in ("~", "~/a", "/a", "a")] == list(map(Path, ("/h", "/h/a", "/a", "a")))
    assert cache_directory() == Path("/h/.cache/catenary")
    monkeypatch.setenv("CATENARY_CACHE", "~/c")
    assert cache_directory() == Path("/h/c")
    with pytest.raises(NoHomeError, match="there is no such user"):
        expanded("~nobody-of-this-name/a")


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_is_told_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match="home directory: set HOME or CATENARY_CACHE, or give --cache"):
        cache_of_up(None)
    with pytest.raises(StartRefused, match=r"--log-dir: user \d+ has no home directory"):
        require_writable(Path("~/logs"), "log-dir")
    with pytest.raises(ModelError, match="has no home directory"):
        default_cache_dir()
    assert cache_of_up(tmp_path) == tmp_path


@pytest.mark.usefixtures("homeless")
def test_no_path_of_an_engine_falls_back_to_the_root_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = r"user \d+ has no home directory"
    with pytest.raises(ModelError, match=f"model directory '~/m': {refused}"):
        resolve_source("~/m")
    with pytest.raises(DeviceError, match=f"the recipe cache ~/r: {refused}"):
        use_recipe_cache(RecipeCache(Path("~/r")), "1.24.0", 0, {})
    with pytest.raises(StartRefused, match=f"--state-dir: {refused}"):
        StateDirectory.open(Path("~/s"), 8000)
    monkeypatch.setenv("MODELSCOPE_CACHE", "~/c")
    with pytest.raises(ModelError, match=f"MODELSCOPE_CACHE '~/c': {refused}"):
        prepare_model("modelscope:group/name", cache_dir=Path("/nowhere"))


def test_a_temporary_directory_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_temporary_directory()
    for missing in (tmp_path / "none", tmp_path / "file"):
        (tmp_path / "file").touch()
        monkeypatch.setenv("TMPDIR", str(missing))
        with pytest.raises(StartRefused, match="is no directory that can be written"):
            check_temporary_directory()


def test_a_temporary_directory_has_room_for_the_names_of_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(
        StartRefused, match=r"is too long for the sockets in it: choose one of at most \d+ bytes"
    ):
        check_temporary_directory()


def test_no_temporary_directory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", none)
    with pytest.raises(StartRefused, match="no temporary directory can be written: set TMPDIR"):
        check_temporary_directory()


def test_what_is_to_be_set_is_what_the_path_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "CATENARY_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 4_000_000)
    with pytest.raises(NoHomeError, match=r"set HOME or CATENARY_CACHE$"):
        cache_directory()
    with pytest.raises(NoHomeError, match=r"set HOME, or write the path without ~$"):
        expanded("~/state")
