# SPDX-License-Identifier: Apache-2.0
"""The proxy's own Prometheus metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from vllm_kairos.core.route import Route
from vllm_kairos.proxy.fleet import Node

_TTFT_BUCKETS = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0),
    *(7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0),
)
_ERROR_BUCKETS = (
    *(-20.0, -10.0, -5.0, -2.0, -1.0, -0.5, -0.2, -0.1, -0.05, 0.0),
    *(0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0),
)
_DECISION_BUCKETS = (*(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2),)


class _NodeGauges:
    """Gauges read at scrape time, so that no request pays for them."""

    def __init__(self) -> None:
        self.nodes: Iterable[Node] = ()
        self.queue: Callable[[], tuple[int, int]] = lambda: (0, 0)

    def collect(self) -> Iterator[Metric]:
        """One sample a node."""
        now = time.monotonic()
        age = GaugeMetricFamily(
            "kairos_proxy_state_age_seconds",
            "Age of a node's last state report; absent before the first.",
            labels=["node"],
        )
        up = GaugeMetricFamily(
            "kairos_proxy_node_up", "0 while believed dead.", labels=["node"]
        )
        open_dispatches = GaugeMetricFamily(
            "kairos_proxy_dispatches_open",
            "Dispatches to a node that have not finished.",
            labels=["node"],
        )
        extrapolates = GaugeMetricFamily(
            "kairos_proxy_profile_extrapolated",
            "1 while a node's decode batch is outside the ranges its profile has "
            "seen; absent without a profile or a report.",
            labels=["node"],
        )
        for node in self.nodes:
            label = [node.address]
            if node.report is not None:
                age.add_metric(label, now - node.received_s)
            if node.extrapolates is not None:
                extrapolates.add_metric(label, float(node.extrapolates))
            up.add_metric(label, float(node.up))
            open_dispatches.add_metric(label, len(node.ledger))
        queue = GaugeMetricFamily(
            "kairos_proxy_queue_requests",
            "Requests that wait to be bound, by the class they are ordered in.",
            labels=["order"],
        )
        for order, count in zip(("in_time", "late"), self.queue(), strict=True):
            queue.add_metric([order], count)
        yield from (age, up, open_dispatches, extrapolates, queue)


class ProxyMetrics:
    """Counters and histograms of one proxy, on a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._gauges = _NodeGauges()
        self.registry.register(self._gauges)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kairos_proxy_{name}", text, labels, registry=self.registry)

        def histogram(
            name: str, text: str, buckets: tuple[float, ...], *labels: str
        ) -> Histogram:
            return Histogram(
                f"kairos_proxy_{name}",
                text,
                labels,
                buckets=buckets,
                registry=self.registry,
            )

        self._requests = counter("requests", "Requests by the path they took.", "path")
        self._decisions = counter(
            "decisions", "Routes by the rule that decided.", "reason"
        )
        self._deflections = counter("deflections", "Deflected requests.", "node")
        self._fallbacks = counter(
            "fallbacks", "Requests that left the path planned for them.", "reason"
        )
        self._errors = counter("errors", "Failures of a node.", "node", "reason")
        self._releases = counter(
            "kv_releases",
            "KV that a request left on its prefill node, by what became of it.",
            "outcome",
        )
        self._reports = counter("state_reports", "State reports by verdict.", "verdict")
        self._statuses = counter("responses", "Responses by status.", "code")
        self._lengths = counter(
            "prompt_lengths", "Prompt lengths by how they were found.", "source"
        )
        self._ttft = histogram(
            "ttft_seconds",
            "Arrival to first byte of streamed requests.",
            _TTFT_BUCKETS,
            "path",
        )
        self._predicted = histogram(
            "ttft_predicted_seconds", "TTFT the route predicted.", _TTFT_BUCKETS, "path"
        )
        self._error = histogram(
            "ttft_error_seconds",
            "Measured minus predicted TTFT of streamed requests.",
            _ERROR_BUCKETS,
            "path",
        )
        self._decision = histogram(
            "decision_seconds", "Time a routing decision took.", _DECISION_BUCKETS
        )
        self._waits = histogram(
            "queue_wait_seconds",
            "Arrival to the decision of requests bound late.",
            _TTFT_BUCKETS,
            "order",
        )

    def watch(self, nodes: Iterable[Node]) -> None:
        """Nodes to show gauges of."""
        self._gauges.nodes = nodes

    def waited(self, order: str, seconds: float) -> None:
        """A request leaves the queue; `order` is ``in_time`` or ``late``."""
        self._waits.labels(order).observe(max(0.0, seconds))

    def watch_queue(self, classes: Callable[[], tuple[int, int]]) -> None:
        """Show how many requests of a queue are in time, and how many late."""
        self._gauges.queue = classes

    def decided(self, route: Route, seconds: float) -> None:
        """A policy has routed a request."""
        self._decisions.labels(route.reason or "unnamed").inc()
        self._decision.observe(seconds)
        if route.deflected:
            self._deflections.labels(route.decode).inc()

    def answered(self, path: str, status: int) -> None:
        """The answer's status is known."""
        self._requests.labels(path).inc()
        self._statuses.labels(str(status)).inc()

    def first_byte(self, path: str, seconds: float, predicted_ms: float | None) -> None:
        """A streamed request has its first byte."""
        self._ttft.labels(path).observe(seconds)
        if predicted_ms is not None:
            self._predicted.labels(path).observe(predicted_ms / 1e3)
            self._error.labels(path).observe(seconds - predicted_ms / 1e3)

    def fallback(self, reason: str) -> None:
        """A request leaves the path planned for it."""
        self._fallbacks.labels(reason).inc()

    def error(self, node: str, reason: str) -> None:
        """A node failed a request."""
        self._errors.labels(node, reason).inc()

    def released(self, outcome: str) -> None:
        """KV left behind was freed, or given up to vLLM's time-out."""
        self._releases.labels(outcome).inc()

    def reports(self, verdict: str) -> None:
        """A state report came in."""
        self._reports.labels(verdict).inc()

    def length(self, source: str) -> None:
        """A prompt length was found."""
        self._lengths.labels(source).inc()

    def text(self) -> bytes:
        """All of it, in Prometheus's text form."""
        return generate_latest(self.registry)
