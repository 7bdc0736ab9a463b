"""What a trace shows about a device computation."""

from __future__ import annotations

from dataclasses import asdict

from services.engine.bucketing import Bucket
from services.engine.graphs.padding import PhaseWork
from services.engine.graphs.phase import Key
from services.engine.tracing import Span


def describe(
    span: Span, key: Key, work: PhaseWork | None, *, way: str, compilations: int, warming: bool
) -> None:
    """Tells a computation's shape, its work and whether it was captured or compiled.

    `way` is replayed, captured, compiled or eager.
    """
    if isinstance(key, Bucket):
        span.args["bucket"] = f"batch {key.batch}, query {key.query}, blocks {key.context_blocks}"
        span.args |= asdict(key)
    else:
        span.args["count"] = key
    if work is not None:
        span.args |= asdict(work)
    span.args |= {"way": way, "compilations": compilations}
    if warming:
        span.args["warm_up"] = True
    span.category = "device"
    if compilations or way in ("captured", "compiled"):
        span.mark_compiled("captured" if way == "captured" else "compiled")
