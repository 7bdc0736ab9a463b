"""The limits that control groups set for this process, as containers and systemd use them.

A process is in one group of each hierarchy, and each group above it limits it as well. Both versions are
read: the single hierarchy of version 2, and one for each controller of version 1. Groups above the mount, as
a container has them, cannot be seen. Sets of CPUs are left out: the scheduler's affinity has them already.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Where the hierarchies are if the kernel does not tell the mounts.
_USUAL = Path("/sys/fs/cgroup")
# Version 1 says "none" as the largest number of pages.
_NO_LIMIT = 1 << 62
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A group's limit in bytes, what the group uses of it, and the file that sets it.

    Inactive file cache, which the kernel can drop at once, does not count as used.
    """

    limit: int
    used: int
    file: Path

    @property
    def left(self) -> int:
        """Bytes that may still be taken."""
        return max(0, self.limit - self.used)


def memory_limits(root: Path = Path("/")) -> tuple[MemoryLimit, ...]:
    """Return the limits of this process's group and of those above it; a group without one is left out."""
    found: list[MemoryLimit] = []
    for group in groups_of(root, "memory"):
        for limit_name, used_name, droppable in (
            # Beyond `high` the kernel slows the group down until it is as good as stopped.
            ("memory.high", "memory.current", "inactive_file"),
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _number(group / limit_name), _number(group / used_name) or 0
            if limit is not None and 0 <= limit < _NO_LIMIT:
                unused = _counter(group / "memory.stat", droppable) or 0
                found.append(MemoryLimit(limit, max(0, used - unused), group / limit_name))
    return tuple(found)


def cpu_limit(root: Path = Path("/")) -> float | None:
    """Return how many CPUs may be busy at once by the quotas of all groups; None without a quota."""
    return min(
        (cpus for group in groups_of(root, "cpu") if (cpus := _quota(group)) is not None), default=None
    )


def count_oom_kills(root: Path = Path("/")) -> int | None:
    """Return how many processes of this process's group the kernel killed for memory; None if it is not told.

    Without such a group the machine's own number is returned.
    """
    for group in groups_of(root, "memory"):
        for file in ("memory.events", "memory.oom_control"):
            if (kills := _counter(group / file, "oom_kill")) is not None:
                return kills
    return _counter(root / "proc/vmstat", "oom_kill")


def _quota(group: Path) -> float | None:
    words = _text(group / "cpu.max").split()
    if not words:
        words = [_text(group / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    try:
        quota, period = (int(word) for word in words)
    except ValueError:  # "max", or no such files
        return None
    return quota / period if quota > 0 and period > 0 else None


def groups_of(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directory of this process's group and those above it, in version 1's hierarchy of the
    controller if there is one, else in version 2's."""
    paths = _paths(root)
    for name in (controller, ""):
        mount = _mount(root, name)
        if mount is None:
            continue
        inside, at = mount
        group = _below(at, inside, paths.get(name, "/"))
        yield group
        while group != at:
            group = group.parent
            yield group
        if name:
            return


def _paths(root: Path) -> dict[str, str]:
    """Return the process's group by controller, as the kernel names it; "" is version 2's hierarchy."""
    found: dict[str, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for name in controllers.split(","):
            found[name] = path
    return found


def _mount(root: Path, controller: str) -> tuple[str, Path] | None:
    """Return the mounted group and its mount point, for version 1's controller; "": for version 2."""
    mounts = _text(root / "proc/self/mountinfo")
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        places, kinds = left.split(), right.split()
        if len(places) < 5 or len(kinds) < 3:
            continue
        matches = kinds[0] == "cgroup" and controller in kinds[2].split(",")
        if matches if controller else kinds[0] == "cgroup2":
            return _plain(places[3]), _under(root, _plain(places[4]))
    return ("/", _under(root, str(_USUAL))) if not mounts and not controller else None


def _below(at: Path, inside: str, path: str) -> Path:
    """Return the directory of the group `path`, where `inside` is mounted at `at`; `at` if it is not seen
    there."""
    pure = PurePosixPath(path)
    if ".." in pure.parts or not pure.is_relative_to(inside):
        return at
    group = at / pure.relative_to(inside)
    return group if group.is_dir() else at


def _under(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _plain(text: str) -> str:
    """Return a path of mountinfo, in which blanks and the like are octal numbers."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return ""


def _number(file: Path) -> int | None:
    try:
        return int(_text(file))
    except ValueError:  # "max", or no such file
        return None


def _counter(file: Path, name: str) -> int | None:
    """Return the number behind a name in a file of such lines."""
    for line in _text(file).splitlines():
        key, _, number = line.partition(" ")
        if key == name and number.strip().isdigit():
            return int(number)
    return None
