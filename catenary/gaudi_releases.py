"""The releases of Habana's software: what an engine accepts, and what `catenary doctor` looks for.

From the vendor's support matrices and from release notes of its vLLM plugin.
"""

from __future__ import annotations

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
