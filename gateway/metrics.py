"""Prometheus metrics. Own names are `catenary_*`; those that vLLM has too are repeated under its names.

Token counters take no lock for each part, unlike the client library's: they are used from the event loop
alone, which also answers scrapes. Labels come from closed sets only: served models, route templates, known
methods, fixed reasons."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from catenary.resume import Cause
from catenary.v1 import router_pb2
from gateway.errors import ApiError
from gateway.http.request import ClientGone, SlowReader
from gateway.streaming.answers import Usage

_LABELS = ("model_name",)


class TokenCount:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class TokenCounter(Collector):
    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._models: dict[str, TokenCount] = {}
        registry.register(self)

    def of(self, model: str) -> TokenCount:
        return self._models.setdefault(model, TokenCount())

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._text, labels=_LABELS)
        for model, count in self._models.items():
            family.add_metric([model], count.value)
        yield family


class TokenTimes:
    """Seconds between the tokens of one model."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, seconds: float, times: int) -> None:
        """Add `times` gaps of `seconds` each."""
        self.counts[bisect_left(self._bounds, seconds)] += times
        self.total += seconds * times


class TokenHistogram(Collector):
    """Histogram for each model. `bounds`: the upper bounds of its buckets, ascending, without infinity."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(map(float, bounds))
        self._models: dict[str, TokenTimes] = {}
        registry.register(self)

    def of(self, model: str) -> TokenTimes:
        return self._models.setdefault(model, TokenTimes(self._bounds))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=_LABELS)
        for model, times in self._models.items():
            buckets: list[tuple[str, float]] = []
            counted = 0
            for bound, count in zip((*map(str, self._bounds), "+Inf"), times.counts, strict=True):
                counted += count
                buckets.append((bound, counted))
            family.add_metric([model], buckets, times.total)
        yield family


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_MODEL = ("model_name",)
ERROR_CODES = frozenset(
    {
        "context_length_exceeded",
        "disconnect",
        "engine_unavailable",
        "internal_error",
        "invalid_value",
        "model_not_found",
        "rate_limit_exceeded",
        "request_poisoned",
        "slow_reader",
        "timeout",
        "tokenizer_unavailable",
        "unsupported_value",
    }
)

Served = Sequence[router_pb2.ServedModel]


class GatewayMetrics:
    """Counters of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._http = Counter(
            "catenary_http_requests",
            "Answered HTTP requests.",
            ("route", "method", "status"),
            registry=self.registry,
        )
        self._http_seconds = self._histogram(
            "catenary_http_seconds", "Seconds of an HTTP request.", _SECONDS, ("route",)
        )
        self.prompt_tokens = self._counter("catenary_prompt_tokens", "Prompt tokens of accepted requests.")
        self.generated_tokens = TokenCounter("catenary_generation_tokens", "Generated tokens.", self.registry)
        self.success = self._counter("catenary_request_success", "Finished choices.", ("finished_reason",))
        self.failures = self._counter(
            "catenary_request_failures", "Requests that failed or were given up, by reason.", ("reason",)
        )
        self.first_token = self._histogram(
            "catenary_time_to_first_token_seconds", "Arrival to first token.", _SECONDS
        )
        self.inter_token = TokenHistogram(
            "catenary_inter_token_latency_seconds", "Between tokens.", _TOKEN_SECONDS, self.registry
        )
        self.per_token = self._histogram(
            "catenary_request_time_per_output_token_seconds",
            "Mean seconds per token after the first, once per request.",
            _TOKEN_SECONDS,
        )
        self.end_to_end = self._histogram("catenary_e2e_request_latency_seconds", "Arrival to end.", _SECONDS)
        self.request_prompt = self._histogram("catenary_request_prompt_tokens", "Prompt tokens.", _TOKENS)
        self.request_generated = self._histogram(
            "catenary_request_generation_tokens", "Generated tokens.", _TOKENS
        )
        self._resumed = Counter(
            "catenary_resumed_sequences",
            "Sequences that lost their engine or router and went on elsewhere, by cause.",
            ("cause",),
            registry=self.registry,
        )
        self._given_up = Counter(
            "catenary_given_up_sequences",
            "Sequences that failed since no engine could resume them, by cause.",
            ("cause",),
            registry=self.registry,
        )
        self._add_aliases()

    def _add_aliases(self) -> None:
        self.registry.register(
            _Aliases(
                [
                    self.prompt_tokens,
                    self.generated_tokens,
                    self.success,
                    self.first_token,
                    self.inter_token,
                    self.per_token,
                    self.end_to_end,
                    self.request_prompt,
                    self.request_generated,
                ],
                # vLLM's name for the inter-token time until it got one for the mean of a request.
                {"vllm:time_per_output_token_seconds": self.inter_token},
            )
        )

    def observe_http(self, route: str, method: str, status: int, seconds: float) -> None:
        self._http.labels(route, method, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def resumed(self, cause: Cause) -> None:
        """Count a sequence that continues on another engine or router."""
        self._resumed.labels(cause).inc()

    def given_up(self, cause: Cause) -> None:
        """Count a sequence whose attempts are exhausted."""
        self._given_up.labels(cause).inc()

    def page(self, accept: str) -> tuple[bytes, str]:
        encode, media_type = choose_encoder(accept)
        return encode(self.registry), media_type

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, text, _MODEL + labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float], labels: tuple[str, ...] = _MODEL
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)


class RequestTimer:
    def __init__(self, metrics: GatewayMetrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._started = time.perf_counter()
        self._first: float | None = None
        self._last: dict[int, float] = {}
        self._inter_token = metrics.inter_token.of(model)
        self._generated = metrics.generated_tokens.of(model)
        self.accepted = False
        """Whether an engine has answered: a request that was refused before has no latency and no tokens."""
        self.told_error = False
        """Whether the client was sent an error within a stream that goes on to its end."""

    def raised(self, error: BaseException) -> None:
        """Count an error that ended the request, if it is a refusal or the client left."""
        if isinstance(error, ApiError):
            self.failed(error.code or "")
        elif isinstance(error, ClientGone):
            self.failed("slow_reader" if isinstance(error, SlowReader) else "disconnect")

    def tokens(self, choice: int, count: int) -> None:
        """Count `count` new tokens of a choice."""
        if not count:
            return
        now = time.perf_counter()
        if self._first is None:
            self._first = now
            self._metrics.first_token.labels(self._model).observe(now - self._started)
        # Tokens that came together with a choice's first one have no time between them.
        since = self._last.get(choice)
        if since is not None:
            self._inter_token.add((now - since) / count, count)
        elif count > 1:
            self._inter_token.add(0.0, count - 1)
        self._last[choice] = now
        self._generated.value += count

    def accept(self, prompt_tokens: int) -> None:
        self.accepted = True
        self._metrics.prompt_tokens.labels(self._model).inc(prompt_tokens)

    def failed(self, reason: str) -> None:
        """Count an error, or a client that left, as the end of the request."""
        self.told_error = True
        known = reason if reason in ERROR_CODES else "internal_error"
        self._metrics.failures.labels(self._model, known).inc()

    def finished(self, reasons: Iterable[str], usage: Usage, choices: int) -> None:
        """Count the end of a request that was accepted, or whose client left.

        Tokens are those of accepted requests alone, as `accept` counts them: no token of another is known to
        be computed."""
        now = time.perf_counter()
        metrics, model = self._metrics, self._model
        for reason in reasons:
            metrics.success.labels(model, reason).inc()
        metrics.end_to_end.labels(model).observe(now - self._started)
        if self.accepted:
            metrics.request_prompt.labels(model).observe(usage.prompt_tokens)
            metrics.request_generated.labels(model).observe(usage.completion_tokens)
        later = usage.completion_tokens - choices
        if self._first is not None and later > 0:
            metrics.per_token.labels(model).observe(
                (max(self._last.values()) - self._first) * choices / later
            )


class FleetCollector(Collector):
    """Gauges read at scrape time: the router's last announcement, and this gateway's own state."""

    def __init__(
        self, models: Callable[[], Served], live: Callable[[], int], connected: Callable[[], int]
    ) -> None:
        self._models = models
        self._live = live
        self._connected = connected

    def collect(self) -> Iterator[Metric]:
        running = GaugeMetricFamily(
            "vllm:num_requests_running", "Sequences running on engines.", labels=_MODEL
        )
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Sequences waiting.", labels=_MODEL)
        used = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV blocks in use.", labels=_MODEL)
        serving = GaugeMetricFamily("catenary_serving_engines", "Engines that take sequences.", labels=_MODEL)
        for model in self._models():
            name, load = [model.info.name], model.load
            running.add_metric(name, load.running)
            waiting.add_metric(name, load.waiting)
            used.add_metric(name, load.used_blocks / load.total_blocks if load.total_blocks else 0.0)
            serving.add_metric(name, model.serving_engines)
        for family in (running, waiting, used):
            yield family
            yield _renamed(family, family.name.replace("vllm:", "catenary_"))
        yield _renamed(used, "vllm:gpu_cache_usage_perc")
        yield serving
        yield GaugeMetricFamily(
            "catenary_gateway_live_sequences", "Sequences of this gateway.", value=self._live()
        )
        yield GaugeMetricFamily(
            "catenary_router_connected", "Routers that a session is up with.", value=self._connected()
        )


class _Aliases(Collector):
    """Metrics repeated under vLLM's names: `same` with another prefix, `others` named by their keys."""

    def __init__(self, same: Sequence[Collector], others: Mapping[str, Collector]) -> None:
        self._same = same
        self._others = others

    def collect(self) -> Iterator[Metric]:
        for metric in self._same:
            for family in metric.collect():
                yield _renamed(family, family.name.replace("catenary_", "vllm:"))
        for name, metric in self._others.items():
            for family in metric.collect():
                yield _renamed(family, name)


def _renamed(family: Metric, name: str) -> Metric:
    alias = Metric(name, family.documentation, family.type, family.unit)
    for sample in family.samples:
        if sample.name.endswith("_created"):
            continue
        alias.add_sample(
            name + sample.name.removeprefix(family.name),
            sample.labels,
            sample.value,
            sample.timestamp,
            sample.exemplar,
        )
    return alias
