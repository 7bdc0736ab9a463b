"""Spans of a sequence in the router: one span for each decision about it."""

from __future__ import annotations

from catenary.telemetry import record_span, tracing
from catenary.v1 import common_pb2
from services.router.placement import Receipt

NAME = "route"


def trace_placed(spec: common_pb2.SequenceSpec, receipt: Receipt) -> str:
    """It goes to an engine: the span lasts from when it began to wait, and tells the receipt. Returns the
    traceparent that the engine gets."""
    if not tracing():
        return spec.traceparent
    lasted_s = receipt.queued_ms / 1e3 + receipt.decision_us / 1e6
    return record_span(NAME, spec.traceparent, receipt.attributes(), lasted_s=lasted_s) or ""


def trace_refused(spec: common_pb2.SequenceSpec, error: common_pb2.Error, waited_s: float) -> None:
    """It was not taken, or waited `waited_s` in vain."""
    if tracing():
        attributes = {"catenary.sequence_id": spec.request_id, "gen_ai.request.model": spec.model}
        code = common_pb2.ErrorCode.Name(error.code)
        record_span(NAME, spec.traceparent, attributes, lasted_s=waited_s, error=code)
