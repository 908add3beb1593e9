"""Every metric of the router, declared once; the registry is passed in. Recording never raises. Knows no HTTP."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from slipstream.observability.guard import guarded

CONTENT_TYPE = CONTENT_TYPE_LATEST

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_SLOW = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class RouterMetrics:
    """Identities: TTFT count = requests that gave a token; E2E count = requests of the generating routes with code 200."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        ProcessCollector(registry=registry)
        counter, histogram = guarded(Counter("slipstream_router_metric_faults", "Values that could not be recorded; the log "
                                             "says which.", registry=registry))
        self.requests = counter("slipstream_router_requests", "Requests by route template and HTTP status; of a stream, of "
                                "its end.", ("route", "code"), registry=registry)
        self.in_flight = Gauge("slipstream_router_in_flight", "Requests admitted and not ended.", registry=registry)
        self.waiting = Gauge("slipstream_router_waiting", "Of those, requests that wait for their turn.", registry=registry)
        self.replicas = Gauge("slipstream_router_replicas", "Connected replicas by role.", ("role",), registry=registry)
        self.ttft = histogram("slipstream_router_ttft_seconds", "Arrival of the request to its first token.", buckets=_SLOW,
                              registry=registry)
        self.itl = histogram("slipstream_router_itl_seconds", "Time between the arrivals of a request's tokens.", buckets=_FAST,
                             registry=registry)
        self.e2e = histogram("slipstream_router_e2e_seconds", "Arrival of the request to its end, if it ended well.",
                             buckets=_SLOW, registry=registry)
        self.transfer = histogram("slipstream_router_transfer_seconds", "Begin to commit of a prompt's transfer.",
                                  buckets=_SLOW, registry=registry)
        self.prompt_tokens = counter("slipstream_router_prompt_tokens", "Tokens of prompts that were admitted.",
                                     registry=registry)
        self.output_tokens = counter("slipstream_router_output_tokens", "Tokens received from workers.", registry=registry)
        self.transfer_bytes = counter("slipstream_router_transfer_bytes", "Payload that travelled from prefill to decode.",
                                      ("kind",), registry=registry)
        self.errors = counter("slipstream_router_errors", "Requests that failed, by error code.", ("code",), registry=registry)
        self.resumes = counter("slipstream_router_resumes", "Runs that were begun because another one failed, by error code.",
                               ("code",), registry=registry)
        self.cached_tokens = counter("slipstream_router_cached_tokens", "Prompt tokens that prefill had cached.",
                                     registry=registry)
        self.breakers = counter("slipstream_router_breakers_opened", "Replicas that failed so often in a row that they got no "
                                "requests for a while, by role.", ("role",), registry=registry)
        self.decode_retries = counter("slipstream_router_decode_retries", "Decode attempts beyond the first.",
                                      registry=registry)

        self.local_prefills = counter("slipstream_router_local_prefills", "Runs whose prompt decode computed, by why.",
                                      ("reason",), registry=registry)
        self.cache_loads = counter("slipstream_router_cache_loads", "Loads of cached prompts from decode to prefill, by what "
                                   "became of them.", ("outcome",), registry=registry)
        self.loaded_tokens = counter("slipstream_router_loaded_tokens", "Tokens that they brought, so that prefill did not "
                                     "compute them.", registry=registry)
        self.prefix_keys = Gauge("slipstream_router_prefix_keys", "Blocks in the index of what workers have cached.",
                                 registry=registry)

    def exposition(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self.registry)
