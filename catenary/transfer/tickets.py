"""Tickets: the right to fetch, and the key of everything that proves something about what is fetched.

A ticket is 32 random bytes that the fetching engine learns from the router. It never crosses the connector's
own wire: the offer is named by a digest of it, a request is authenticated with it, and it keys the checksums
of blocks.

That checksum is a keyed BLAKE2b (RFC 7693) of the block's place and CRC-32. The digest ties the block to the
ticket, the prompt, the layout and its index, so nothing that belongs elsewhere passes for it. The block's
bytes go through the CRC alone: it finds what memory, cables and defects do at several GiB/s, where a digest
of all bytes would be the slowest part of the way. Against somebody on the path it proves nothing: he reads
the KV as well, and is to be kept off that network.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import zlib
from typing import Final

TICKET_BYTES: Final = 32
DIGEST_BYTES: Final = 16

_NAME: Final = b"catenary kv name"
_REQUEST: Final = b"catenary kv ask"
_BLOCK: Final = b"catenary kv data"


def new_ticket() -> bytes:
    """A ticket that nobody can guess."""
    return secrets.token_bytes(TICKET_BYTES)


def name_of(ticket: bytes) -> bytes:
    """The public name of the ticket's offer, 16 bytes."""
    return hashlib.blake2b(ticket, digest_size=DIGEST_BYTES, person=_NAME).digest()


def sign(ticket: bytes, nonce: bytes, request: bytes) -> bytes:
    """Proof that who asks for `request` on a connection that began with `nonce` has the ticket, 16 bytes."""
    return hashlib.blake2b(nonce + request, digest_size=DIGEST_BYTES, key=ticket, person=_REQUEST).digest()


def equal(one: bytes, other: bytes) -> bool:
    """Compares secrets in constant time."""
    return hmac.compare_digest(one, other)


class Checksums:
    """Checksums of one offer's blocks, 16 bytes each."""

    def __init__(self, ticket: bytes, binding: bytes, layout: bytes) -> None:
        self._keyed = hashlib.blake2b(digest_size=DIGEST_BYTES, key=ticket, person=_BLOCK)
        self._keyed.update(binding + layout)

    def of(self, index: int, block: memoryview) -> bytes:
        """That of the offer's block `index`."""
        digest = self._keyed.copy()
        digest.update(index.to_bytes(4, "little") + zlib.crc32(block).to_bytes(4, "little"))
        return digest.digest()
