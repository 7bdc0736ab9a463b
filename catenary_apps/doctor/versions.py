"""Which versions of the vendor's software fit together.

From the vendor's support matrices and from release notes of its vLLM plugin: facts/gaudi.md, section 6, and
facts/dependencies.md. An engine refuses the same pairs of torch and software when it starts; this is for
hosts on which none has been started yet, and knows drivers as well.
"""

from __future__ import annotations

import re

from catenary.gaudi_releases import RELEASES, Version

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
