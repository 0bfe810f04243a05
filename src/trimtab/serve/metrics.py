"""What the server counts, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Metrics:
    """Counters of one server; a registry of its own, so that two servers in a process do not mix."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "trimtab_requests", "Chat requests by the status they ended with.", ["status"], registry=registry
        )
        self.waiting = Gauge("trimtab_requests_waiting", "Accepted, not yet being answered.", registry=registry)
        self.running = Gauge("trimtab_requests_running", "Being answered.", registry=registry)
        self.prompt_tokens = Counter("trimtab_prompt_tokens", "Tokens of prompts, images included.", registry=registry)
        self.new_tokens = Counter("trimtab_generated_tokens", "Tokens generated.", registry=registry)
        self.images = Counter("trimtab_images", "Images decoded.", registry=registry)
        self.queue_s = Histogram(
            "trimtab_queue_seconds", "From acceptance to the model.", buckets=_SECONDS, registry=registry
        )
        self.first_token_s = Histogram(
            "trimtab_first_token_seconds", "From acceptance to the first token.", buckets=_SECONDS, registry=registry
        )
        self.answer_s = Histogram(
            "trimtab_answer_seconds", "From acceptance to the last token.", buckets=_SECONDS, registry=registry
        )

    def text(self) -> bytes:
        """The exposition format, version 0.0.4."""
        return bytes(generate_latest(self._registry))
