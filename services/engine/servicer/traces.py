"""What traces learn of a sequence in an engine, as the servicer sees it: its prefill, its decode."""

from __future__ import annotations

import time

from catenary.telemetry import record_span
from catenary.v1 import common_pb2

_REASONS = common_pb2.FinishReason
_FAILED = common_pb2.FINISH_REASON_ERROR


class SequenceTrace:
    """Of one sequence, begun when the core gets it. Prefill is all until its first tokens, decode the rest.

    Its spans are children of what the router decided.
    """

    __slots__ = ("_parent", "_prefilled", "_sequence_id", "_since")

    def __init__(self, spec: common_pb2.SequenceSpec) -> None:
        self._parent = spec.traceparent or None
        self._sequence_id = spec.request_id
        self._since = time.monotonic()
        self._prefilled = False

    def emitted(self) -> None:
        """It has tokens."""
        if not self._prefilled:
            self._prefilled = True
            self._record("prefill", {"catenary.sequence_id": self._sequence_id})

    def ended(self, end: common_pb2.SequenceEnd) -> None:
        """It is over."""
        usage = end.usage
        attributes: dict[str, str | int] = {
            "catenary.sequence_id": self._sequence_id,
            "catenary.finish_reason": _REASONS.Name(end.reason).removeprefix("FINISH_REASON_").lower(),
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "catenary.usage.cached_tokens": usage.cached_tokens,
        }
        error = common_pb2.ErrorCode.Name(end.error.code) if end.reason == _FAILED else None
        self._record("decode" if self._prefilled else "prefill", attributes, error)

    def _record(self, name: str, attributes: dict[str, str | int], error: str | None = None) -> None:
        now = time.monotonic()
        record_span(name, self._parent, attributes, lasted_s=now - self._since, error=error)
        self._since = now
