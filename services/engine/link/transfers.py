"""KV that one engine hands to another: parts of SubmitSequence, EndRow and CoreLoad."""

from __future__ import annotations

from msgspec import Struct


class OfferedKv(Struct, frozen=True, array_like=True):
    """The contract's KvOffer: KV of a prompt's first `tokens` tokens, in `blocks` blocks, and where it is."""

    connector: str
    address: str
    ticket: bytes
    host_id: str
    blocks: int
    tokens: int
    layout: bytes


class TransferLoad(Struct, frozen=True, array_like=True):
    """KV handed on since the core's start.

    Of a prefill engine: offers made, and what became of them: `fetched`, `expired`, `evicted` (others needed
    the blocks, or there were too many), `withdrawn` (aborted, or their router left); `offers` and `blocks`
    are held now. Of a decode engine: prompts that `arrived`, and by cause those that did not; `fetching` now.
    """

    made: int = 0
    fetched: int = 0
    expired: int = 0
    evicted: int = 0
    withdrawn: int = 0
    offers: int = 0
    blocks: int = 0
    bytes_sent: int = 0
    arrived: int = 0
    fetching: int = 0
    bytes_received: int = 0
    faults: dict[str, int] = {}
