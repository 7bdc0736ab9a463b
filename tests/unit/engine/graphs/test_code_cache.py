"""The cache of compiled code: what is damaged or half written is never given to the compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.engine.graphs import CodeCache


def filled(directory: Path) -> Path:
    cache = CodeCache(directory)
    assert cache.open()
    (cache.code / "sub").mkdir()
    (cache.code / "sub" / "kernel.so").write_bytes(b"machine code" * 100)
    (cache.code / "graph").write_bytes(b"graph")
    cache.seal()
    cache.close()
    return cache.code


def reopen(directory: Path) -> bool:
    cache = CodeCache(directory)
    try:
        return cache.open()
    finally:
        cache.close()


def test_a_sound_cache_is_kept(tmp_path: Path) -> None:
    code = filled(tmp_path)
    assert reopen(tmp_path)
    assert (code / "sub" / "kernel.so").stat().st_size == 1200


@pytest.mark.parametrize(
    "damage", ["truncate", "garbage", "remove", "manifest", "manifest_kind", "manifest_gone"]
)
def test_a_damaged_cache_is_emptied_and_usable_again(tmp_path: Path, damage: str) -> None:
    code = filled(tmp_path)
    kernel, manifest = code / "sub" / "kernel.so", tmp_path / "manifest.json"
    match damage:
        case "truncate":
            kernel.write_bytes(kernel.read_bytes()[:7])
        case "garbage":
            kernel.write_bytes(b"\0" * 1200)
        case "remove":
            kernel.unlink()
        case "manifest":
            manifest.write_text("{")
        case "manifest_kind":
            manifest.write_text("[1]")
        case "manifest_gone":
            manifest.unlink()
    # Without a manifest nothing is known to be whole: no damage, but nothing is kept either.
    assert reopen(tmp_path) is (damage == "manifest_gone")
    assert not [path for path in code.rglob("*") if path.is_file()]
    filled_again = CodeCache(tmp_path)
    assert filled_again.open()
    (code / "graph").write_bytes(b"new")
    filled_again.seal()
    filled_again.close()
    assert reopen(tmp_path)
    assert (code / "graph").read_bytes() == b"new"


def test_what_was_written_after_the_seal_is_not_trusted(tmp_path: Path) -> None:
    code = filled(tmp_path)
    (code / "half.so").write_bytes(b"machi")
    (code / "some.lock").write_bytes(b"")
    assert reopen(tmp_path)
    assert not (code / "half.so").exists()
    assert (code / "graph").exists()


def test_a_cache_in_use_is_left_alone(tmp_path: Path) -> None:
    code = filled(tmp_path)
    first = CodeCache(tmp_path)
    assert first.open()
    (code / "being_written").write_bytes(b"")
    assert reopen(tmp_path)
    assert (code / "being_written").exists()
    first.close()


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        CodeCache(tmp_path / "file" / "cache").open()
