"""The section of the configuration that tunes the choice of replicas; `slipstream.config` reads it."""

from __future__ import annotations

from dataclasses import dataclass

POLICIES = ("auto", "round_robin", "least_load", "prefix")
EMPTY_POOL = ("fail", "local")
AT_LEAST_0 = " ".join(f"router.routing.{name}" for name in (
    "index_bytes", "predict_seconds", "balance_seconds", "compute_weight", "local_prefill_tokens", "load_tokens",
    "stall_weight", "decisions"))
"""Keys that no number below 0 makes sense for."""


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """[router.routing]: what the policies weigh; docs/routing.md says how."""

    index_bytes: int = 256 << 20
    """Memory for what the caches of all workers hold, as this router knows it; beyond it the oldest is forgotten."""
    predict_seconds: float = 10.0
    """For so long, and at most twice that, a prompt counts as cached where it was sent, unless the worker says otherwise; 0:
    only what workers say counts."""
    balance_seconds: float = 0.1
    """`auto`: what a full replica costs more than an idle one."""
    compute_weight: float = 12.0
    """`auto`: how many times the seconds that a prompt's own computation takes count: others wait behind it, and what it
    caches a second time drives something else out."""
    local_prefill_tokens: int = 0
    """`auto`: a decode replica may compute the prompt of a request without pictures if at most so many of its tokens are not
    cached there; 0: it never does."""
    load_tokens: int = 256
    """The chosen prefill replica loads from a decode replica what that has cached of the prompt beyond what it has itself, an
    answer of the last turn say, if it is at least so many tokens and comes sooner than it would be computed: less is hardly
    worth two messages and a wait. 0: it never does. A hybrid model's decode replicas keep `engine.state_snapshots` for it."""
    load_seconds: float = 2.0
    """Longest wait for such a load; then the prompt is computed. A load that takes longer saves nobody time."""
    stall_weight: float = 0.1
    """`auto`: share of the time of such a computation that counts for each sequence that decodes beside it."""
    decisions: int = 1024
    """Requests whose decisions `slipstream explain` can show."""
    dns_seconds: float = 5.0
    """How often the names of `--worker-dns` are looked up."""
