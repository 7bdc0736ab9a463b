"""Which versions of the vendor's software fit together.

From the vendor's support matrices and from release notes of its vLLM plugin: facts/gaudi.md, section 6, and
facts/dependencies.md. services/engine/device/hpu refuses the same pairs of torch and software when an engine
starts; this is for hosts on which none has been started yet, and knows drivers and Pythons as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Release:
    """A release of the Gaudi software: the torch that its updates bring, and the Pythons of its images."""

    torches: tuple[Version, ...]
    pythons: tuple[Version, ...]


RELEASES: dict[Version, Release] = {
    (1, 22): Release(((2, 7),), ((3, 10), (3, 11), (3, 12))),
    (1, 23): Release(((2, 9),), ((3, 10), (3, 11), (3, 12))),
    (1, 24): Release(((2, 10), (2, 11)), ((3, 10), (3, 11), (3, 12))),
}

_NUMBERS = re.compile(r"(\d+)\.(\d+)")


def minor(text: str) -> Version | None:
    """Major and minor number of a version such as hl-1.22.1-fw-61.4.2.1 or 2.9.0+hpu_1.23.0."""
    found = _NUMBERS.search(text)
    return (int(found[1]), int(found[2])) if found else None


def shown(version: Version) -> str:
    """As people write it."""
    return f"{version[0]}.{version[1]}"


def known_releases() -> str:
    """The releases of the table, oldest first."""
    return ", ".join(shown(version) for version in RELEASES)
