"""What tracing costs a step: when nobody listens, and during a profile."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

from benchmarks.step_overhead import CASES, fill, make_core
from services.engine.tracing import EventBuffer, StepTracer


def span_cost(tracer: StepTracer, count: int) -> float:
    """Return nanoseconds of one span."""
    start = time.perf_counter_ns()
    for step in range(count):
        with tracer.span("plan", step):
            pass
    return (time.perf_counter_ns() - start) / count


def step_costs(running: int, context: int, steps: int) -> tuple[list[float], list[float], float]:
    """CPU milliseconds of the process per step without and with a listener in turns, and events per step."""
    core: Any = make_core(running, overlap=True)
    fill(core, running, CASES["greedy"], context)
    gc.collect()
    gc.freeze()
    times: tuple[list[float], list[float]] = ([], [])
    events = 0
    for number in range(steps * 2):
        buffer = EventBuffer(10_000)
        if number % 2:
            core._tracer.listen(buffer)
        start = time.process_time_ns()
        core.advance()
        times[number % 2].append((time.process_time_ns() - start) / 1e6)
        core._tracer.leave_out(buffer)
        events += len(buffer.events) - 1
    return *times, events / steps


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--spans", type=int, default=200_000)
    options = parser.parse_args()
    off = span_cost(StepTracer(), options.spans)
    on = span_cost(StepTracer(EventBuffer(options.spans)), options.spans)
    print(f"a span: {off:.0f} ns when nobody listens, {on:.0f} ns in a profile")
    idle, listening, events = step_costs(options.running, options.context, options.steps)
    print(
        f"{options.running} running sequences, CPU ms per step, median: {statistics.median(idle):.3f} when "
        f"nobody listens, {statistics.median(listening):.3f} in a profile; {events:.0f} events per step"
    )
    print(f"so at most {events * off / 1000:.2f} us of a step go to tracing when nobody listens")


if __name__ == "__main__":
    main()
