"""Which of several routers gets a sequence. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol, TypeVar


class Place(Protocol):
    """A router that can be given sequences."""

    @property
    def address(self) -> str:
        """The same in every gateway."""

    @property
    def live(self) -> int:
        """Sequences of this gateway that it has."""


P = TypeVar("P", bound=Place)


def home(tenant: str, places: Sequence[P]) -> P:
    """The place that has the whole of a tenant, whichever gateway asks: a router is fair among those whose
    requests it sees. If it leaves, its tenants are spread over the others, and no other tenant moves
    (rendezvous hashing: the highest digest of tenant and address)."""
    return max(places, key=lambda place: _digest(tenant, place.address))


def least(places: Sequence[P], turn: int) -> P:
    """The place that has the fewest sequences of this gateway: where requests without a tenant
    go. Equals take turns by `turn`, a number that rises."""
    first = turn % len(places)
    return min((*places[first:], *places[:first]), key=lambda place: place.live)


def _digest(tenant: str, address: str) -> bytes:
    return blake2b(f"{tenant}\0{address}".encode(), digest_size=8).digest()
