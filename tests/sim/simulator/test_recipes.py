"""The recipe cache on disk (gaudi-facts.md 2.4)."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from services.engine.device.sim.recipes import RecipeCache, RecipeCacheConfig

MIB = 2**20


def opened(
    directory: Path, version: str = "1.24.0", device: str = "gaudi3", rank: int = 0, **more: object
) -> RecipeCache:
    return RecipeCache(
        RecipeCacheConfig(str(directory), **more),  # type: ignore[arg-type]
        rank=rank,
        version=version,
        device=device,
    )


def test_a_recipe_is_found_by_the_next_start_of_the_same_software(tmp_path: Path) -> None:
    first = opened(tmp_path / "cache")
    assert not first.lookup("a")
    first.store("a", 1000)
    assert opened(tmp_path / "cache").lookup("a")
    assert not opened(tmp_path / "cache").lookup("b")
    assert not opened(tmp_path / "cache", version="1.23.0").lookup("a")
    assert not opened(tmp_path / "cache", device="gaudi2").lookup("a")


def test_ranks_have_directories_of_their_own(tmp_path: Path) -> None:
    opened(tmp_path / "cache").store("a", 1)
    other = opened(tmp_path / "cache", rank=1)
    assert not other.lookup("a")
    assert {path.name for path in tmp_path.iterdir()} == {"cache0", "cache1"}


def test_delete_on_start(tmp_path: Path) -> None:
    opened(tmp_path / "cache").store("a", 1)
    assert not opened(tmp_path / "cache", delete=True).lookup("a")


def test_the_oldest_recipes_make_room(tmp_path: Path) -> None:
    cache = opened(tmp_path / "cache", max_mib=2)
    known: set[Path] = set()
    for second, name in enumerate("abc"):
        cache.store(name, MIB)
        for path in set(cache.directory.iterdir()) - known:
            os.utime(path, (second, second))
            known.add(path)
    assert [cache.lookup(name) for name in "abc"] == [False, True, True]


def test_what_earlier_starts_stored_counts(tmp_path: Path) -> None:
    first = opened(tmp_path / "cache", max_mib=2)
    for name in "ab":
        first.store(name, MIB)
    for path in first.directory.iterdir():
        os.utime(path, (1, 1))
    opened(tmp_path / "cache", max_mib=2).store("c", 2 * MIB)
    assert [first.lookup(name) for name in "abc"] == [False, False, True]


def test_the_directory_is_not_listed_at_each_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened(tmp_path / "cache", max_mib=2)

    def refuse(*args: object) -> None:
        raise AssertionError("the directory is listed")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "glob", refuse)
        for name in "ab":
            cache.store(name, MIB)
        with pytest.raises(AssertionError, match="is listed"):
            cache.store("c", MIB)


def test_another_engine_may_take_recipes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened(tmp_path / "cache", max_mib=1)
    cache.store("a", 10)
    gone = cache.directory / "gone.recipe"
    monkeypatch.setattr(Path, "glob", lambda *_: iter([gone, *sorted(cache.directory.iterdir())]))
    cache.store("b", MIB)
    assert not gone.exists()


def test_a_directory_that_cannot_be_made_is_fatal(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="Recipe cache path is expected"):
        opened(tmp_path / "file" / "cache")


def test_a_directory_that_cannot_be_written_is_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened(tmp_path / "cache")

    def refuse(*args: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RuntimeError, match=r"Could not open existing metadata file .*Permission denied"):
        cache.lookup("a")


def test_a_full_disk_only_loses_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened(tmp_path / "cache")
    assert not cache.lookup("a")

    def refuse(*args: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        cache.store("a", 1000)
    assert not cache.lookup("a")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        (",false,1024,false", None),
        ("/c", RecipeCacheConfig("/c", False, 1024)),
        ("/c,true,16,false", RecipeCacheConfig("/c", True, 16)),
    ],
)
def test_variable(text: str, expected: RecipeCacheConfig | None) -> None:
    assert RecipeCacheConfig.parse(text, (1, 24, 0)) == expected


@pytest.mark.parametrize(
    ("text", "version", "message"),
    [
        ("/c,true,16,false", (1, 19, 0), "range <1:3>"),
        ("/c,true,16,false,x", (1, 24, 0), "range <1:4>"),
        ("/c,perhaps", (1, 24, 0), "expected true or false, not 'perhaps'"),
        ("/c,true,much", (1, 24, 0), "must be a number of MB, not 'much'"),
    ],
)
def test_wrong_variable(text: str, version: tuple[int, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        RecipeCacheConfig.parse(text, version)
