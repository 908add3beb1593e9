"""Every metric of a prefill or decode worker, declared once; the registry is passed in. Recording never raises.

Labels are bounded: `role` is on every series, `kind` is kv or state, `code` an error code. Knows no engine and no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector

from slipstream.observability.guard import guarded
from slipstream.types import EngineCounters, EngineLoad, Role

PREFIX = "slipstream_worker_"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
OK = "ok"
"""The `code` of a leg that ended well."""


class WorkerMetrics:
    """Identities: requests by code sum to all legs that ended; used + free = all KV blocks; running of role prefill are
    prompts, of role decode sequences, and both together what runs in the deployment."""

    def __init__(self, registry: CollectorRegistry, role: Role, load: Callable[[], EngineLoad]) -> None:
        """`load`: the replica's latest load; asked on every scrape, from any thread."""
        self.registry = registry
        self._role = role.value
        self._load = load
        self._before = EngineCounters()
        ProcessCollector(registry=registry)
        faults = Counter(f"{PREFIX}metric_faults", "Values that could not be recorded; the log says which.", ("role",),
                         registry=registry)
        self._count, self._distribution = guarded(faults.labels(self._role))
        self._legs = self._count(f"{PREFIX}requests", "Legs of requests that ended here, refused ones included: ok, or the "
                                 "code of the error.", ("role", "code"), registry=registry)
        self._legs.labels(self._role, OK)
        self._bytes = self._count(f"{PREFIX}transfer_bytes", "Payload that landed here, of transfers that were committed.",
                                  ("role", "kind"), registry=registry)
        for kind in ("kv", "state"):
            self._bytes.labels(self._role, kind)
        self._queue = self._histogram("queue_seconds", "Submit of a prompt to its first chunk's start; prefill only.")
        self._prefill = self._histogram("prefill_seconds", "First chunk's start to the first token; prefill only.")
        self._decode = self._histogram("decode_seconds", "Commit of a transfer to the last token; decode only.")
        self._transfer = self._histogram("transfer_seconds", "Begin to commit of a transfer; decode only.")
        self._info = Info("slipstream_worker", "What this worker is.", registry=registry)
        self._gauges()
        self._counters = {
            "steps": self._counter("steps", "Engine steps."),
            "step_seconds": self._counter("step_seconds", "Time inside engine steps."),
            "prompt_tokens": self._counter("prompt_tokens", "Of prompts that got their memory here to be computed, cached ones "
                                           "included: the prefix cache's queries."),
            "cached_tokens": self._counter("cached_tokens", "Of prompt_tokens, those found in the prefix cache: its hits."),
            "landed_tokens": self._counter("landed_tokens", "Of prompts that came from prefill, those already here included."),
            "reused_tokens": self._counter("reused_tokens", "Of landed_tokens, those found in the prefix cache: their KV did "
                                           "not travel."),
            "output_tokens": self._counter("output_tokens", "Tokens drawn here."),
            "spec_draft_tokens": self._counter("spec_draft_tokens", "Drafts that were verified (speculative.tokens)."),
            "spec_accepted_tokens": self._counter("spec_accepted_tokens", "Of spec_draft_tokens, those that became output."),
            "preemptions": self._counter("preemptions", "Requests handed back for a resume, to free memory for others."),
            "evicted_blocks": self._counter("evicted_blocks", "Cached blocks dropped to make room."),
        }

    def _gauges(self) -> None:
        """All read from the latest load when they are asked for, so none can be left behind by a request."""
        self._gauge("waiting", "Requests that own nothing yet.", lambda load: load.waiting)
        self._gauge("running", "Requests being computed (role prefill) or decoded (role decode).", lambda load: load.running)
        self._gauge("parked", "Prompts that hold memory for a destination that is not ready.", lambda load: load.parked)
        self._gauge("kv_blocks", "KV blocks of this replica.", lambda load: load.total_blocks)
        self._gauge("kv_blocks_free", "KV blocks that a request could have now; cached ones that nobody reads are among them.",
                    lambda load: load.free_blocks)
        self._gauge("kv_blocks_used", "KV blocks that requests hold.", lambda load: load.total_blocks - load.free_blocks)
        self._gauge("kv_blocks_cached", "KV blocks of the prefix cache, read or not.", lambda load: load.cached_blocks)
        self._gauge("state_slots", "Recurrent-state slots of this replica; 0 for a model without such states.",
                    lambda load: load.total_state_slots)
        self._gauge("state_slots_used", "Recurrent-state slots that requests hold.",
                    lambda load: load.total_state_slots - load.free_state_slots)

    # Recording --------------------------------------------------------------------------------------------------------------

    def describe(self, fields: Mapping[str, str]) -> None:
        """What does not change while the process lives: the labels of `slipstream_worker_info`."""
        self._info.info({"role": self._role, **fields})

    def leg_ended(self, code: str, *, queue_seconds: float = 0.0, compute_seconds: float = 0.0) -> None:
        """Count one leg, as it was told to the router. 0 seconds of computing: it did not get that far."""
        self._legs.labels(self._role, code).inc()
        if compute_seconds > 0:
            is_prefill = self._role == Role.PREFILL.value
            (self._prefill if is_prefill else self._decode).observe(compute_seconds)
            if is_prefill:
                self._queue.observe(queue_seconds)

    def transfer_landed(self, seconds: float, *, kv_bytes: int, state_bytes: int) -> None:
        """Count one transfer that came whole."""
        self._transfer.observe(seconds)
        for kind, count in (("kv", kv_bytes), ("state", state_bytes)):
            self._bytes.labels(self._role, kind).inc(count)

    def engine_did(self, counters: EngineCounters) -> None:
        """Add what the engine has done since the last call."""
        before, self._before = self._before, counters
        for name, counter in self._counters.items():
            counter.inc(getattr(counters, name) - getattr(before, name))

    # Declaring --------------------------------------------------------------------------------------------------------------

    def _counter(self, name: str, text: str) -> Counter:
        return self._count(PREFIX + name, text, ("role",), registry=self.registry).labels(self._role)

    def _histogram(self, name: str, text: str) -> Histogram:
        return self._distribution(PREFIX + name, text, ("role",), buckets=_SECONDS, registry=self.registry).labels(self._role)

    def _gauge(self, name: str, text: str, value: Callable[[EngineLoad], int]) -> None:
        gauge = Gauge(PREFIX + name, text, ("role",), registry=self.registry).labels(self._role)
        gauge.set_function(lambda: value(self._load()))
