"""The recipe cache on disk: compiled recipes outlive the process (gaudi-facts.md 2.4)."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from catenary.telemetry import get_logger
from services.engine.device.sim.settings import SimSettings

log = get_logger(__name__)

VARIABLE = "PT_HPU_RECIPE_CACHE_CONFIG"
_RECIPE = ".recipe"
_METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class RecipeCacheConfig:
    """`<directory>,<delete on start>,<max MB>[,<on NFS>]`, with the bridge's defaults."""

    directory: str
    delete: bool = False
    max_mib: int = 1024

    @classmethod
    def parse(cls, text: str, version: tuple[int, ...]) -> RecipeCacheConfig | None:
        """None where the directory is empty: no cache. Raises RuntimeError as the bridge does.

        Software up to 1.19 takes three fields, later a fourth; it chooses how files are locked, which the
        simulator does not show.
        """
        fields = [field.strip() for field in text.split(",")]
        most = 3 if version < (1, 20) else 4
        if len(fields) > most:
            raise RuntimeError(
                f"Expected number of parameters extracted from {VARIABLE} should be from range <1:{most}>."
            )
        if not fields[0]:
            return None
        delete = _boolean(fields[1]) if len(fields) > 1 and fields[1] else False
        try:
            max_mib = int(fields[2]) if len(fields) > 2 and fields[2] else 1024
        except ValueError:
            raise RuntimeError(f"{VARIABLE}: the size must be a number of MB, not {fields[2]!r}") from None
        return cls(fields[0], delete, max_mib)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise RuntimeError(f"{VARIABLE}: expected true or false, not {text!r}")
    return text.lower() in ("true", "1")


def open_cache(environment: Mapping[str, str], settings: SimSettings) -> RecipeCache | None:
    """The cache that PT_HPU_RECIPE_CACHE_CONFIG names for this process's RANK. Raises RuntimeError."""
    config = RecipeCacheConfig.parse(environment.get(VARIABLE, ""), settings.version_tuple)
    if config is None:
        return None
    rank = int(environment.get("RANK", "0"))
    return RecipeCache(config, rank=rank, version=settings.version, device=settings.device)


class RecipeCache:
    """The files of one rank: its number is appended to the directory's name.

    Entries belong to one software version and one kind of device: those of another are never found. A
    directory that cannot be made or written is fatal, as it is to the bridge; one that is full is not: a
    recipe that cannot be stored is compiled again next time.
    """

    def __init__(self, config: RecipeCacheConfig, *, rank: int, version: str, device: str) -> None:
        self.directory = Path(f"{config.directory}{rank}")
        self._most = config.max_mib * 1024 * 1024
        self._identity = f"{version}/{device}"
        with contextlib.suppress(OSError):
            self.directory.mkdir()
        if not self.directory.is_dir():
            raise RuntimeError(f"Recipe cache path is expected: {self.directory}")
        if config.delete:
            for path in self.directory.iterdir():
                path.unlink(missing_ok=True)
        # Bytes of recipes, as far as this process knows: no listing at each of thousands of recipes.
        self._bytes = sum(size for _, size, _ in self._recipes())

    def lookup(self, recipe: str) -> bool:
        """True if an earlier start stored the recipe. Raises RuntimeError if the files are unusable."""
        metadata = self._path(recipe, _METADATA)
        try:
            descriptor = os.open(metadata, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise RuntimeError(
                f"Could not open existing metadata file {metadata}, err: {error.strerror}"
            ) from None
        try:
            return os.fstat(descriptor).st_size > 0
        finally:
            os.close(descriptor)

    def store(self, recipe: str, size: int) -> None:
        """Keep a recipe of `size` bytes; older ones go where the directory would exceed its limit."""
        path = self._path(recipe, _RECIPE)
        try:
            # A sparse file: what the limit counts is its length.
            with path.open("wb") as file:
                file.truncate(size)
            self._path(recipe, _METADATA).write_text(self._identity, encoding="utf-8")
        except OSError as error:
            log.warning("a compiled recipe could not be cached", path=str(path), error=error.strerror)
            return
        self._bytes += size
        if self._bytes > self._most:
            self._evict()

    def _evict(self) -> None:
        recipes = sorted(self._recipes())
        self._bytes = sum(size for _, size, _ in recipes)
        for _, size, path in recipes:
            if self._bytes <= self._most:
                return
            self._bytes -= size
            path.unlink(missing_ok=True)
            path.with_suffix(_METADATA).unlink(missing_ok=True)

    def _recipes(self) -> list[tuple[int, int, Path]]:
        """Time of writing in ns, bytes and path of each. Another engine may take some away meanwhile."""
        found: list[tuple[int, int, Path]] = []
        for path in self.directory.glob(f"*{_RECIPE}"):
            with contextlib.suppress(FileNotFoundError):
                facts = path.stat()
                found.append((facts.st_mtime_ns, facts.st_size, path))
        return found

    def _path(self, recipe: str, suffix: str) -> Path:
        name = hashlib.sha256(f"{self._identity}/{recipe}".encode()).hexdigest()[:32]
        return self.directory / f"{name}{suffix}"
