"""Memory of the system that an allocator has no part in."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

HUGE_PAGE = 2 << 20


def map_zeros(size: int) -> torch.Tensor:
    """uint8 [size], zeros at the begin of a page: real memory only from the first write on, page by page.

    In huge pages where the system has them: a context or weights in small ones take up to twice as long to
    read. `size` is at least 1. Raises OSError when the process may have no more.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Linux may have been built without them.
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
