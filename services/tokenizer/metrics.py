"""Prometheus metrics of the tokenizer service. Labels are closed sets."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

TASKS = Counter(
    "catenary_tokenizer_tasks",
    "Tasks that ended, by kind and outcome (ok, refused, overloaded, timeout, crashed, broken, cancelled).",
    ["kind", "outcome"],
)
SECONDS = Histogram(
    "catenary_tokenizer_task_seconds",
    "Time from a task's arrival to its end, waiting included, in seconds.",
    ["kind"],
    buckets=(0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30),
)
TOKENS = Counter("catenary_tokenizer_tokens", "Token ids given out, by kind of task.", ["kind"])
WAITING = Gauge("catenary_tokenizer_waiting_tasks", "Tasks that wait for a worker.")
WORKERS = Gauge("catenary_tokenizer_workers", "Worker processes that live.")
