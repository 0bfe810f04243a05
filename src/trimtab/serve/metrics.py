"""What the server counts, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Metrics:
    """Counters of one server; a registry of its own, so that two servers in a process do not mix."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter("trimtab_requests", "Requests by their status.", ["status"], registry=registry)
        self.accepted = Gauge("trimtab_requests_accepted", "Accepted and not yet answered.", registry=registry)
        self.running = Gauge("trimtab_requests_running", "In the batch being generated.", registry=registry)
        self.prompt_tokens = Counter("trimtab_prompt_tokens", "Tokens of prompts, images included.", registry=registry)
        self.new_tokens = Counter("trimtab_generated_tokens", "Tokens generated.", registry=registry)
        self.batches = Counter("trimtab_batches", "Calls of generate.", registry=registry)
        self.queue_s = Histogram(
            "trimtab_queue_seconds", "From a prepared prompt to the model.", buckets=_SECONDS, registry=registry
        )
        self.answer_s = Histogram(
            "trimtab_answer_seconds", "From a prepared prompt to the last token.", buckets=_SECONDS, registry=registry
        )

    def text(self) -> bytes:
        """The exposition format, version 0.0.4."""
        return bytes(generate_latest(self._registry))
