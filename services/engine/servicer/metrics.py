"""The engine's Prometheus metrics, read from the frontend at each scrape. No label names a request."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from catenary.v1 import engine_pb2
from services.engine.link import ConstraintLoad, GraphLoad, TransferLoad
from services.engine.servicer.frontend import EngineFrontend


class EngineCollector(Collector):
    """Counts of one engine."""

    def __init__(self, frontend: EngineFrontend) -> None:
        self._frontend = frontend

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this moment."""
        load = self._frontend.load()
        gauges = {
            "running_sequences": ("Sequences that run.", load.running),
            "waiting_sequences": ("Sequences that wait in the engine.", load.waiting),
            "used_blocks": ("KV blocks in use.", load.used_blocks),
            "total_blocks": ("KV blocks of the pool.", load.total_blocks),
            "pending_prefill_tokens": (
                "Prompt tokens that no forward computed yet.",
                load.pending_prefill_tokens,
            ),
            "captured_buckets": (
                "Static shapes that are captured or compiled.",
                self._frontend.graphs.captured,
            ),
            "warmup_progress": (
                "Warm-up done, 0 to 1; of the whole start while the engine starts.",
                _warm_up(self._frontend),
            ),
            "attached_routers": ("Routers that this engine is attached to.", len(self._frontend.routers)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"catenary_engine_{name}", text, value=value)
        counters = {
            "steps": ("Steps made.", load.steps),
            "generated_tokens": ("Tokens generated.", load.generated_tokens),
            "core_restarts": ("Times that a dead core was started again.", self._frontend.core_restarts),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"catenary_engine_{name}", text, value=value)
        yield from _prompts(load)
        yield from _shapes(self._frontend.graphs)
        yield _device(self._frontend.graphs)
        yield from _constraints(self._frontend.constraints)
        yield from _transfers(self._frontend.transfers)
        states = GaugeMetricFamily(
            "catenary_engine_state", "1 for the state the engine is in.", labels=["state"]
        )
        for name, number in engine_pb2.EngineState.items():
            label = name.removeprefix("ENGINE_STATE_").lower()
            if label != "unspecified":
                states.add_metric([label], float(number == load.state))
        yield states


def _prompts(load: engine_pb2.LoadReport) -> Iterator[Metric]:
    """Yield counts of sequences that started, under our names and under vLLM's."""
    for name, alias, text, value in (
        (
            "prompt_tokens",
            "prefix_cache_queries",
            "Prompt tokens of sequences that started.",
            load.prompt_tokens,
        ),
        (
            "cached_prompt_tokens",
            "prefix_cache_hits",
            "Those of them whose KV was cached.",
            load.cached_prompt_tokens,
        ),
        ("preemptions", "num_preemptions", "Sequences that were preempted.", load.preemptions),
    ):
        yield CounterMetricFamily(f"catenary_engine_{name}", text, value=value)
        yield CounterMetricFamily(f"vllm:{alias}", text, value=value)


def _warm_up(frontend: EngineFrontend) -> float:
    if frontend.ready is None:
        return frontend.progress.fraction or 0.0
    return frontend.graphs.warm / frontend.graphs.to_warm if frontend.graphs.to_warm else 1.0


def _device(graphs: GraphLoad) -> Metric:
    family = CounterMetricFamily(
        "catenary_engine_device_events",
        "What the device did: captures, replays, compilations, CPU fallbacks.",
        labels=["event"],
    )
    for name, count in graphs.device.items():
        family.add_metric([name], count)
    return family


def _constraints(load: ConstraintLoad) -> Iterator[Metric]:
    results = CounterMetricFamily(
        "catenary_engine_constraints",
        "Constraints of sequences: compiled, equal to one that was, refused.",
        labels=["result"],
    )
    for name in ("compiled", "reused", "refused"):
        results.add_metric([name], getattr(load, name))
    yield results
    counters = {
        "constraint_compile_seconds": (
            "Seconds of other threads that compiled.",
            load.compile_seconds,
        ),
        "masked_steps": ("Steps with masks of constraints.", load.masks),
        "mask_seconds": ("Seconds that filling these masks took.", load.mask_seconds),
    }
    for name, (text, value) in counters.items():
        yield CounterMetricFamily(f"catenary_engine_{name}", text, value=value)


def _transfers(load: TransferLoad) -> Iterator[Metric]:
    offers = CounterMetricFamily(
        "catenary_engine_kv_offers",
        "Prompts whose KV was offered to other engines (made), and what became of the offers.",
        labels=["result"],
    )
    for name in ("made", "fetched", "expired", "evicted", "withdrawn"):
        offers.add_metric([name], getattr(load, name))
    yield offers
    arrivals = CounterMetricFamily(
        "catenary_engine_kv_arrivals",
        "Prompts whose KV another engine offered: arrived, or why they were computed here.",
        labels=["result"],
    )
    for name, count in {"arrived": load.arrived, **load.faults}.items():
        arrivals.add_metric([name], count)
    yield arrivals
    moved = CounterMetricFamily(
        "catenary_engine_kv_transfer_bytes", "KV that was sent and received.", labels=["direction"]
    )
    moved.add_metric(["sent"], load.bytes_sent)
    moved.add_metric(["received"], load.bytes_received)
    yield moved
    yield GaugeMetricFamily(
        "catenary_engine_kv_offered_blocks", "KV blocks that offers hold.", value=load.blocks
    )
    yield GaugeMetricFamily(
        "catenary_engine_kv_fetching", "Prompts whose KV is on its way here.", value=load.fetching
    )


def _shapes(graphs: GraphLoad) -> Iterator[Metric]:
    """Yield first-seen shapes, and the work of the phases and its padding."""
    yield CounterMetricFamily(
        "catenary_engine_first_seen_shapes",
        "Shapes and compilations that serving met and warm-up did not.",
        value=graphs.first_seen,
    )
    for name, text in (
        ("tokens", "Tokens (prefill) and rows (decode) computed"),
        ("blocks", "KV blocks of context read"),
    ):
        for prefix, what in (("", "."), ("padding_", " for padding alone.")):
            family = CounterMetricFamily(f"catenary_engine_{prefix}{name}", text + what, labels=["phase"])
            family.add_metric(["prefill"], getattr(graphs.prefill, prefix + name))
            family.add_metric(["decode"], getattr(graphs.decode, prefix + name))
            yield family
