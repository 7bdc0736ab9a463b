"""Cards and the processes that use them, by the operating system."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Driver:
    """The kernel driver's traces; `root` is the root of the file system."""

    root: Path = field(default=Path("/"))

    @property
    def loaded(self) -> bool:
        """Whether the kernel module is there."""
        return (self.root / "sys/module/habanalabs").is_dir()

    @property
    def version(self) -> str | None:
        """The module's version, None if it does not tell."""
        try:
            return (self.root / "sys/module/habanalabs/version").read_text().strip()
        except OSError:
            return None

    def devices(self) -> list[Path]:
        """Device files of the cards that are visible here."""
        return sorted((self.root / "dev/accel").glob("accel[0-9]*"))

    def holders(self) -> list[tuple[int, str]]:
        """Processes, by id and name, that have a card open: those whose descriptors this user may see."""
        found: list[tuple[int, str]] = []
        for process in (self.root / "proc").glob("[0-9]*"):
            if int(process.name) != os.getpid() and _holds_card(process):
                found.append((int(process.name), _name_of(process)))
        return sorted(found)


def _holds_card(process: Path) -> bool:
    try:
        links = [os.readlink(entry) for entry in (process / "fd").iterdir()]
    except OSError:
        return False
    return any(link.startswith("/dev/accel/accel") for link in links)


def _name_of(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "unknown"
