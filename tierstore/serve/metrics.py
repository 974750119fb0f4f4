"""Prometheus metrics of the server's engine. No metric identifies a tenant."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tierstore.serve.request import Usage

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
OUTCOMES = ("done", "failed", "cancelled", "refused", "busy")


class Figures:
    """The metrics of one engine, in a separate Prometheus registry. Thread-safe.

    ``active`` and ``waiting`` are called at each scrape. ``active`` returns the number of requests that are being
    computed, and ``waiting`` returns the number of requests in the queue.
    """

    def __init__(self, active: Callable[[], int], waiting: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "tierstore_serve_requests", "Requests, by outcome.", ["outcome"], registry=self._registry
        )
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        self._prompt = Counter(
            "tierstore_serve_prompt_tokens",
            "Prompt tokens of completed requests, by source: a tier, or computed.",
            ["source"],
            registry=self._registry,
        )
        self._answered = Counter(
            "tierstore_serve_completion_tokens", "Tokens generated in answers.", registry=self._registry
        )
        self._waited = self._histogram(
            "waited", "Time from the arrival of a request to the start of its computation"
        )
        self._first = self._histogram("first_token", "Time from the arrival of a request to its first token")
        for name, what, read in (
            ("active", "Requests that are being computed.", active),
            ("waiting", "Requests that wait in the queue.", waiting),
        ):
            Gauge(f"tierstore_serve_{name}", what, registry=self._registry).set_function(read)

    def ended(self, outcome: str) -> None:
        """Count a request by its outcome, one of ``OUTCOMES``."""
        self._requests.labels(outcome).inc()

    def answered(self, usage: Usage) -> None:
        """Count a completed request, its tokens and its latencies."""
        self.ended("done")
        for tier, count in usage.reused.items():
            self._prompt.labels(tier).inc(count)
        self._prompt.labels("computed").inc(usage.prompt_tokens - usage.reused_tokens)
        self._answered.inc(usage.completion_tokens)
        self._waited.observe(usage.waited_s)
        self._first.observe(usage.ttft_s)

    def text(self) -> str:
        """Return the metrics in Prometheus text format."""
        return generate_latest(self._registry).decode()

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(
            f"tierstore_serve_{name}_seconds",
            f"{what}, in seconds.",
            buckets=_SECONDS,
            registry=self._registry,
        )
