"""The revision of the wire contract, its check between peers, and limits of models and KV offers in it.

Those of sequences are in `catenary/sequence_limits.py`."""

from __future__ import annotations

SCHEMA_REVISION = 4
"""Revision of `protos/catenary/v1`. Raised by a change that an older peer would misread."""

MINIMUM_PEER_REVISION = 4
"""Oldest revision that this build understands."""

MAX_EOS_TOKEN_IDS = 64
"""Most `ModelInfo.eos_token_ids`."""

MAX_LABELS = 1024
"""Most classes of a model (`ModelInfo.labels`)."""

MAX_LABEL_LENGTH = 128
"""Longest name of a class, in characters."""

KV_TICKET_BYTES = range(16, 65)
"""Lengths that `KvOffer.ticket` may have."""


def revision_mismatch(peer_revision: int, peer_minimum: int, *, peer: str) -> str | None:
    """Compare this build with a peer.

    Args:
        peer_revision: the revision that the peer was built with.
        peer_minimum: the oldest revision that the peer understands.
        peer: what to call the peer in the text, for instance "engine".

    Returns:
        None if the two understand one another, else one sentence for people that names both revisions.
    """
    ours = (
        f"this side speaks schema revision {SCHEMA_REVISION} and understands {MINIMUM_PEER_REVISION} or newer"
    )
    spans = f"{ours}, the {peer} speaks {peer_revision} and understands {peer_minimum} or newer"
    if peer_revision < MINIMUM_PEER_REVISION:
        return f"The {peer} is too old: {spans}."
    if peer_minimum > SCHEMA_REVISION:
        return f"The {peer} is too new: {spans}."
    return None
