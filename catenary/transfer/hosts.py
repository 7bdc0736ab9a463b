"""Which host this is: shared memory reaches no further."""

from __future__ import annotations

import hashlib
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """The same for all processes of one kernel since its start, and for no others. Empty: it cannot be told.

    A digest: the id itself is nobody's business on the network.
    """
    try:
        boot = _BOOT_ID.read_bytes()
    except OSError:
        return ""
    return hashlib.blake2b(boot, digest_size=16, person=b"catenary host").hexdigest()
