"""Requests that kill engines: remembered for a time, and refused at once. Pure."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

from catenary.resume import POISONED
from catenary.telemetry import get_logger
from catenary.v1 import common_pb2
from services.router.admission import Refused
from services.router.dispatch.sequence import LiveSequence

_log = get_logger(__name__)
_DIGEST_BYTES = 16

ENGINE_LEFT = common_pb2.Error(
    code=common_pb2.ERROR_CODE_DRAINING, message="The engine that ran the request has left.", retryable=True
)


class PoisonBook:
    """Fingerprints of requests during whose first forward an engine died that computed nothing else.

    At most `limit` of them, each for `ttl_s` seconds: who sends such a request again under another name gets
    no further engine. While there are none, nothing is computed.
    """

    def __init__(
        self,
        *,
        limit: int,
        ttl_s: float,
        on_convicted: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_convicted = on_convicted
        self._limit = limit
        self._ttl_s = ttl_s
        self._clock = clock
        # In the order in which they are forgotten.
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def convict(self, spec: common_pb2.SequenceSpec) -> None:
        """An engine died while it computed this sequence alone."""
        name = fingerprint(spec)
        self._until[name] = self._clock() + self._ttl_s
        self._until.move_to_end(name)
        if len(self._until) > self._limit:
            self._until.popitem(last=False)

    def judge(self, sequence: LiveSequence, error: common_pb2.Error) -> common_pb2.Error:
        """What a sequence is told that its engine has ended with `error`.

        A loss by an engine that was about to leave speaks against nobody. One before the first token of a
        sequence that its engine had alone was caused by that sequence.
        """
        if error.code != common_pb2.ERROR_CODE_ENGINE_LOST:
            return error
        if sequence.link.engine.leaving:
            return ENGINE_LEFT
        if not sequence.alone or sequence.emitted:
            return error
        self.convict(sequence.spec)
        self._on_convicted()
        _log.error("a request that killed engines is not run again", sequence=sequence.spec.request_id)
        return POISONED

    def check(self, spec: common_pb2.SequenceSpec) -> None:
        """Raises Refused: POISONED, for one that is remembered."""
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        if self._until and fingerprint(spec) in self._until:
            raise Refused.of(POISONED)


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
