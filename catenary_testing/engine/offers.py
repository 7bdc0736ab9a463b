"""KV that scripted engines hand on: nothing moves, but who is told to fetch what can be told apart."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict

from catenary.transfer import TransferFault
from services.engine.link import OfferedKv, SubmitSequence, TransferLoad

CONNECTOR = "scripted"
# Offers that an abort still withdraws.
_MOST_OFFERS = 4096


def ticket_of(spec: SubmitSequence) -> bytes:
    """The ticket of a prompt's offer: any scripted engine knows whether an offer is for the right prompt."""
    tokens = spec.token_ids[: spec.prompt_len - 1]
    packed = struct.pack(f"<{len(tokens)}I", *tokens) + spec.cache_salt.encode()
    return hashlib.blake2b(packed, digest_size=16).digest()


class ScriptedOffers:
    """What was offered, and what came of offers of others."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._open: OrderedDict[int, None] = OrderedDict()
        self._made = 0
        self._withdrawn = 0
        self._arrived = 0
        self._faults: dict[str, int] = {}

    def offer(self, spec: SubmitSequence) -> OfferedKv:
        """The offer of a prompt that was computed."""
        tokens = spec.prompt_len - 1
        self._made += 1
        self._open[spec.key] = None
        if len(self._open) > _MOST_OFFERS:
            self._open.popitem(last=False)
        return OfferedKv(
            connector=CONNECTOR,
            address="",
            ticket=ticket_of(spec),
            host_id="",
            blocks=-(-tokens // self._block_size),
            tokens=tokens,
            layout=CONNECTOR.encode(),
        )

    def withdraw(self, key: int) -> bool:
        """Ends an offer. False if there is none."""
        if key not in self._open:
            return False
        del self._open[key]
        self._withdrawn += 1
        return True

    def arrives(self, spec: SubmitSequence) -> bool:
        """Whether the offer that came with a sequence is good, which is counted."""
        if spec.kv_offer is None:
            return False
        if spec.kv_offer.ticket != ticket_of(spec):
            fault = TransferFault.MISMATCH.value
            self._faults[fault] = self._faults.get(fault, 0) + 1
            return False
        self._arrived += 1
        return True

    def load(self) -> TransferLoad:
        """For reports. Nothing is kept, so nothing is held now."""
        return TransferLoad(
            made=self._made,
            withdrawn=self._withdrawn,
            arrived=self._arrived,
            faults=dict(self._faults),
        )
