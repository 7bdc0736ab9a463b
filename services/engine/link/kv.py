"""What the core tells the servicer of its prefix cache. Names of blocks are joined, 16 bytes each."""

from __future__ import annotations

from msgspec import Struct


class FollowKv(Struct, frozen=True, array_like=True, tag="follow_kv"):
    """Somebody wants to know: the core sends its contents, and from then on, as long as it lives, changes."""


class KvContents(Struct, frozen=True, array_like=True, tag="kv_contents"):
    """A part of the names of all blocks that can be hit; `first` begins them and `last` completes them.

    They take the place of all that was told before. Nothing else about the cache comes between the parts.
    """

    names: bytes
    first: bool
    last: bool


class KvChanges(Struct, frozen=True, array_like=True, tag="kv"):
    """What came of the changes since the last message: first all blocks are given up if `cleared`, then
    `removed` can be hit no more, and `stored` can. No name is in both."""

    cleared: bool
    removed: bytes
    stored: bytes
