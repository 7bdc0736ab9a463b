"""Prometheus metrics of the server side. Labels are closed sets: registered methods and status names."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

UNKNOWN_METHOD = "unknown"

HANDLED = Counter(
    "catenary_rpc_server_handled",
    "Calls that ended, by full method name and gRPC status.",
    ["method", "code"],
)
SECONDS = Histogram(
    "catenary_rpc_server_seconds",
    "Duration of calls, streams included, in seconds.",
    ["method"],
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 1, 5, 30, 120, 600),
)
RUNNING = Gauge("catenary_rpc_server_running", "Calls that run now.", ["method"])
