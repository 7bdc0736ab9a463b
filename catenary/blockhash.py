"""Names for full blocks of tokens: equal names mean equal tokens after equal tokens, under one salt.

The engine finds cached KV by these names and a router can compute the same ones, so they are one definition
for both. A name is a BLAKE2b digest (RFC 7693) of 16 bytes: they collide neither by chance nor by a caller's
choice.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

DIGEST_BYTES: Final = 16
_PERSON: Final = b"catenary block"
_MAX_TOKEN: Final = 2**32 - 1
_TOKEN_BYTES: Final = 4
_AFTER_NAME: Final = DIGEST_BYTES.to_bytes(8, "little")


def chain(parent: bytes, token_ids: Sequence[int], *, salt: bytes) -> bytes:
    """Return the name of a block: `token_ids` after the block named `parent`, which is empty for the first
    block.

    Blocks under two salts never share a name. Raises ValueError for a token id that is not in 0 .. 2**32 - 1.
    """
    return _chain(_salted(salt), parent, token_ids)


class BlockHashes:
    """The names of one sequence's full blocks, made as its tokens arrive."""

    def __init__(self, block_size: int, salt: bytes = b"") -> None:
        """Start an empty sequence. Raises ValueError for a block without tokens."""
        if block_size < 1:
            raise ValueError(f"a block holds at least one token, not {block_size}")
        self.block_size = block_size
        self.hashes: list[bytes] = []
        self._salted = _salted(salt)
        # Four bytes a token.
        self._tail = array("I")

    def extend(self, token_ids: Iterable[int]) -> list[bytes]:
        """Append tokens; return the names of the blocks that they fill. `hashes` holds all names.

        Raises ValueError as `chain` does. The object is of no use afterwards.
        """
        try:
            self._tail.extend(token_ids)
        except OverflowError:
            raise _no_token() from None
        blocks = len(self._tail) // self.block_size
        if not blocks:
            return []
        made = self._names(_packed(self._tail[: blocks * self.block_size]))
        del self._tail[: blocks * self.block_size]
        self.hashes += made
        return made

    def _names(self, tokens: bytes) -> list[bytes]:
        """Return the names of full blocks. A long prompt is named in this loop: it calls as little as
        possible."""
        size, copy = self.block_size * _TOKEN_BYTES, self._salted.copy
        parent = self.hashes[-1] if self.hashes else b""
        head, made = _head(parent), []
        for start in range(0, len(tokens), size):
            digest = copy()
            digest.update(head + tokens[start : start + size])
            parent = digest.digest()
            made.append(parent)
            head = _AFTER_NAME + parent
        return made


def _salted(salt: bytes) -> hashlib.blake2b:
    """Return the state every name under a salt starts from: a long salt is read once, not once a block."""
    # The lengths make the input unambiguous: no salt runs into a parent, no parent into tokens.
    return hashlib.blake2b(len(salt).to_bytes(8, "little") + salt, digest_size=DIGEST_BYTES, person=_PERSON)


def _chain(salted: hashlib.blake2b, parent: bytes, token_ids: Sequence[int]) -> bytes:
    try:
        tokens = struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error:
        raise _no_token() from None
    digest = salted.copy()
    digest.update(_head(parent) + tokens)
    return digest.digest()


def _head(parent: bytes) -> bytes:
    """Return the bytes that are hashed before a block's tokens."""
    return len(parent).to_bytes(8, "little") + parent


def _packed(tokens: array[int]) -> bytes:
    """Return the tokens as little-endian numbers of four bytes."""
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def _no_token() -> ValueError:
    return ValueError(f"a token id must be in 0 .. {_MAX_TOKEN}")
