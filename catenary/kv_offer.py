"""Bounds of a `KvOffer`, which a router and both engines must see alike."""

from __future__ import annotations

from typing import Final

from catenary.schema import KV_TICKET_BYTES
from catenary.v1 import common_pb2

# Of the protocol, in characters: addresses and names of our own engines are shorter.
_MAX_CONNECTOR: Final = 64
_MAX_ADDRESS: Final = 512
_MAX_HOST_ID: Final = 128
_MAX_LAYOUT: Final = 64


def well_formed(offer: common_pb2.KvOffer) -> bool:
    """Whether the offer's texts and its ticket have sizes that the contract allows."""
    return (
        len(offer.connector) <= _MAX_CONNECTOR
        and len(offer.address) <= _MAX_ADDRESS
        and len(offer.host_id) <= _MAX_HOST_ID
        and len(offer.layout) <= _MAX_LAYOUT
        and len(offer.ticket) in KV_TICKET_BYTES
    )
