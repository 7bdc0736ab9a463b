"""The engine's Prometheus metrics, read from the hub at each scrape. The state is the only label."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from catenary.v1 import engine_pb2
from services.engine.servicer.hub import EngineHub


class EngineCollector(Collector):
    """Counts of one engine."""

    def __init__(self, hub: EngineHub) -> None:
        self._hub = hub

    def collect(self) -> Iterator[Metric]:
        """The metrics as they stand."""
        load = self._hub.load()
        gauges = {
            "running_sequences": ("Sequences that run.", load.running),
            "waiting_sequences": ("Sequences that wait in the engine.", load.waiting),
            "used_blocks": ("KV blocks in use.", load.used_blocks),
            "total_blocks": ("KV blocks of the pool.", load.total_blocks),
            "pending_prefill_tokens": (
                "Prompt tokens that no forward computed yet.",
                load.pending_prefill_tokens,
            ),
            "attached_routers": ("Routers that this engine is attached to.", self._hub.attached_routers),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"catenary_engine_{name}", text, value=value)
        counters = {
            "steps": ("Steps made.", load.steps),
            "generated_tokens": ("Tokens generated.", load.generated_tokens),
            "core_restarts": ("Times that a dead core was started again.", self._hub.core_restarts),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"catenary_engine_{name}", text, value=value)
        states = GaugeMetricFamily(
            "catenary_engine_state", "1 for the state the engine is in.", labels=["state"]
        )
        for name, number in engine_pb2.EngineState.items():
            label = name.removeprefix("ENGINE_STATE_").lower()
            if label != "unspecified":
                states.add_metric([label], float(number == load.state))
        yield states
