"""A bound on what a piece of a worker's work may take of memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def bounded_memory(more: int) -> Iterator[None]:
    """Run the block with `more` bytes of address space than are in use, or less if the process is bounded so.

    Beyond that Python raises MemoryError; libraries may abort the process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    ceiling = pages * resource.getpagesize() + more
    bound = ceiling if soft == resource.RLIM_INFINITY else min(ceiling, soft)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
