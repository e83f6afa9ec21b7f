"""What GET /metrics shows, in Prometheus' text form; a registry of its own, so that several servers do not add up."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from accelpatch.serving.ticket import Ticket

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "accelpatch_requests", "Requests that were answered, by path and status.", ("path", "status"),
            registry=registry,
        )  # fmt: skip
        self._tokens = Counter("accelpatch_tokens", "Tokens, of prompts and generated.", ("kind",), registry=registry)
        self._hung_up = Counter("accelpatch_hung_up", "Requests whose client went away.", registry=registry)
        self._seconds = self._histogram("accelpatch_request_seconds", "From a request's arrival to its last token.")
        self._first = self._histogram("accelpatch_first_token_seconds", "From a request's arrival to its first token.")
        self._queued = self._histogram("accelpatch_queue_seconds", "From a request's arrival to its turn.")
        self.open = Gauge("accelpatch_requests_open", "Requests that wait or are being answered.", registry=registry)
        self.open.set(0)
        for kind in ("prompt", "generated"):
            self._tokens.labels(kind)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=SECONDS, registry=self._registry)

    def answered(self, path: str, status: int) -> None:
        """Count a request by the status of its answer."""
        self._requests.labels(path, str(status)).inc()

    def finished(self, ticket: Ticket) -> None:
        """Count the tokens and times of a request that reached the model, or left the queue."""
        self._tokens.labels("prompt").inc(ticket.prompt_tokens)
        self._tokens.labels("generated").inc(ticket.tokens)
        self._seconds.observe(time.monotonic() - ticket.arrived)
        if ticket.hung_up:
            self._hung_up.inc()
        for histogram, moment in ((self._queued, ticket.started), (self._first, ticket.first_token)):
            if moment is not None:
                histogram.observe(moment - ticket.arrived)

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self._registry)
