"""Offers of KV on the wire and on the link, and those that routers may still withdraw."""

from __future__ import annotations

from collections import OrderedDict

from msgspec.structs import replace

from catenary.kv_offer import well_formed
from catenary.v1 import common_pb2
from services.engine.link import OfferedKv, SubmitSequence
from services.engine.servicer.inadmissible import Inadmissible

# An offer that no engine can honour: the core counts it as such and computes the prompt.
_NOTHING = OfferedKv("", "", b"", "", 0, 0, b"")


def offer_message(offer: OfferedKv) -> common_pb2.KvOffer:
    """The core's offer in the contract's words."""
    return common_pb2.KvOffer(
        connector=offer.connector,
        address=offer.address,
        ticket=offer.ticket,
        host_id=offer.host_id,
        blocks=offer.blocks,
        tokens=offer.tokens,
        layout=offer.layout,
    )


def offer_of(message: common_pb2.KvOffer) -> OfferedKv:
    """An offer for the core. One that is out of the contract's bounds is good for nothing."""
    if not well_formed(message):
        return _NOTHING
    return OfferedKv(
        connector=message.connector,
        address=message.address,
        ticket=message.ticket,
        host_id=message.host_id,
        blocks=message.blocks,
        tokens=message.tokens,
        layout=message.layout,
    )


def with_role(resolved: SubmitSequence, submit: common_pb2.Submit, role: str) -> SubmitSequence:
    """The sequence with what the submit says of its two halves. Raises Inadmissible.

    An offer to an engine that does not fetch means nothing: it computes the prompt.
    """
    if submit.prefill_only:
        if role != "prefill":
            raise Inadmissible("This engine computes no prompts for others (role).", "prefill_only")
        if resolved.pooling is not None or resolved.beams is not None:
            raise Inadmissible("Only sequences that sample can be handed over.", "prefill_only")
        if not 2 <= resolved.prompt_len == len(resolved.token_ids):
            message = "A prompt that is handed over has at least 2 tokens, and none after it."
            raise Inadmissible(message, "prompt")
        if resolved.sampling.prompt_logprobs >= 0:
            raise Inadmissible("A prompt that is handed over is not scored.", "prompt_logprobs")
        return replace(resolved, prefill_only=True)
    if submit.HasField("kv_offer") and role == "decode":
        return replace(resolved, kv_offer=offer_of(submit.kv_offer))
    return resolved


class OfferHandles:
    """Keys of the sequences that ended with an offer, by link and handle: an abort withdraws it.

    The oldest are forgotten; their offers expire.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._keys: OrderedDict[tuple[int, int], int] = OrderedDict()

    def add(self, link: int, handle: int, key: int) -> None:
        """A sequence of this handle has ended with an offer."""
        self._keys[link, handle] = key
        if len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    def take(self, link: int, handle: int) -> int | None:
        """The key of a handle that has ended with an offer, which is then forgotten."""
        return self._keys.pop((link, handle), None)

    def leave(self, link: int) -> list[int]:
        """Forgets a link; returns its keys."""
        return [self._keys.pop(place) for place in [one for one in self._keys if one[0] == link]]

    def clear(self) -> None:
        """Forgets all: the core that made the offers is gone."""
        self._keys.clear()
