"""Requests that kill engines: remembered for a time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

from catenary.v1 import common_pb2

_DIGEST_BYTES = 16


class PoisonedRequests:
    """Fingerprints of requests during whose first forward an engine died that computed nothing else.

    At most `limit` of them, each for `ttl_s` seconds: who sends such a request again under another name gets
    no further engine. While there are none, nothing is computed.
    """

    def __init__(self, *, limit: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._ttl_s = ttl_s
        self._clock = clock
        # In the order in which they are forgotten.
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, spec: common_pb2.SequenceSpec) -> bool:
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        return bool(self._until) and fingerprint(spec) in self._until

    def add(self, spec: common_pb2.SequenceSpec) -> None:
        """An engine died while it computed this sequence alone."""
        name = fingerprint(spec)
        self._until[name] = self._clock() + self._ttl_s
        self._until.move_to_end(name)
        if len(self._until) > self._limit:
            self._until.popitem(last=False)


def fingerprint(spec: common_pb2.SequenceSpec) -> bytes:
    """A digest of what an engine computes for a sequence: its prompt and parameters.

    The seed, which is drawn anew for most requests, who asks, and what is reported are left out, and so is
    what was emitted before: another life of the sequence is the same request.
    """
    prompt_len = spec.prompt_len if spec.HasField("prompt_len") else len(spec.token_ids)
    sampling = common_pb2.SamplingParams()
    sampling.CopyFrom(spec.sampling)
    sampling.ClearField("seed")
    computed = common_pb2.SequenceSpec(
        model=spec.model,
        token_ids=spec.token_ids[:prompt_len],
        sampling=sampling,
        stopping=spec.stopping,
        constraint=spec.constraint if spec.HasField("constraint") else None,
        beam_search=spec.beam_search if spec.HasField("beam_search") else None,
        pooling=spec.pooling if spec.HasField("pooling") else None,
    )
    return blake2b(computed.SerializeToString(deterministic=True), digest_size=_DIGEST_BYTES).digest()
