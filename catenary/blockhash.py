"""Names for full blocks of tokens: equal names mean equal tokens after equal tokens, under one salt.

The engine finds cached KV by these names and a router can compute the same ones, so they are one definition
for both. A name is a BLAKE2b digest (RFC 7693) of 16 bytes: they collide neither by chance nor by a caller's
choice.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Final

DIGEST_BYTES: Final = 16
_PERSON: Final = b"catenary block"
_MAX_TOKEN: Final = 2**32 - 1


def chain(parent: bytes, token_ids: Sequence[int], *, salt: bytes) -> bytes:
    """The name of a block: `token_ids` after the block named `parent`, which is empty for the first block.

    Blocks under two salts never share a name. Raises ValueError for a token id that is not in 0 .. 2**32 - 1.
    """
    return _chain(_salted(salt), parent, token_ids)


class BlockHashes:
    """The names of one sequence's full blocks, made as its tokens arrive."""

    def __init__(self, block_size: int, salt: bytes = b"") -> None:
        """Starts an empty sequence. Raises ValueError for a block without tokens."""
        if block_size < 1:
            raise ValueError(f"a block holds at least one token, not {block_size}")
        self.block_size = block_size
        self.hashes: list[bytes] = []
        self._salted = _salted(salt)
        self._tail: list[int] = []

    def extend(self, token_ids: Iterable[int]) -> list[bytes]:
        """Appends tokens; returns the names of the blocks that they fill. `hashes` holds all of them.

        Raises ValueError as `chain` does. The object is of no use afterwards.
        """
        self._tail.extend(token_ids)
        full = len(self._tail) - len(self._tail) % self.block_size
        if not full:
            return []
        parent = self.hashes[-1] if self.hashes else b""
        made: list[bytes] = []
        for start in range(0, full, self.block_size):
            parent = _chain(self._salted, parent, self._tail[start : start + self.block_size])
            made.append(parent)
        del self._tail[:full]
        self.hashes += made
        return made


def _salted(salt: bytes) -> hashlib.blake2b:
    """The state every name under a salt starts from: a long salt is read once, not once a block."""
    # The lengths make the input unambiguous: no salt runs into a parent, no parent into tokens.
    return hashlib.blake2b(len(salt).to_bytes(8, "little") + salt, digest_size=DIGEST_BYTES, person=_PERSON)


def _chain(salted: hashlib.blake2b, parent: bytes, token_ids: Sequence[int]) -> bytes:
    try:
        tokens = struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error:
        raise ValueError(f"a token id must be in 0 .. {_MAX_TOKEN}") from None
    digest = salted.copy()
    digest.update(len(parent).to_bytes(8, "little") + parent + tokens)
    return digest.digest()
