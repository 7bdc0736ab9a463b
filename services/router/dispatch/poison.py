"""The requests that are blamed for an engine's death."""

from __future__ import annotations

from collections.abc import Callable

from catenary.resume import POISONED, PoisonedRequests
from catenary.telemetry import get_logger
from catenary.v1 import common_pb2
from services.router.admission import Refused
from services.router.dispatch.sequence import LiveSequence

_log = get_logger(__name__)

ENGINE_LEFT = common_pb2.Error(
    code=common_pb2.ERROR_CODE_DRAINING, message="The engine that ran the request has left.", retryable=True
)


class PoisonBook:
    """Convicts sequences with which an engine died that had nothing else, and refuses them from then on."""

    def __init__(self, known: PoisonedRequests, on_convicted: Callable[[], None]) -> None:
        self._known = known
        self._on_convicted = on_convicted

    def judge(self, sequence: LiveSequence, error: common_pb2.Error) -> common_pb2.Error:
        """The error of a sequence that its engine has ended with `error`.

        A loss by an engine that was about to leave speaks against no request. One before the first token of a
        sequence that its engine had alone was caused by that sequence.
        """
        if error.code != common_pb2.ERROR_CODE_ENGINE_LOST:
            return error
        if sequence.link.engine.leaving:
            return ENGINE_LEFT
        if not sequence.alone or sequence.emitted:
            return error
        self._known.add(sequence.spec)
        self._on_convicted()
        _log.error("a request that killed engines is not run again", sequence=sequence.spec.request_id)
        return POISONED

    def check(self, spec: common_pb2.SequenceSpec) -> None:
        """Raises Refused: POISONED, for one that is remembered."""
        if spec in self._known:
            raise Refused.of(POISONED)
