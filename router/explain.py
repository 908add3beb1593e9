"""What became of recent requests, for `slipstream explain`: decisions with their candidates, legs, retries. Bounded. Knows no
prompt's content."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from router.policies import SCORE, Decision, Score

MAX_EVENTS = 64
"""Of one request; further ones are counted and not kept."""


@dataclass(kw_only=True)
class Trace:
    """One request."""

    id: str
    prompt_tokens: int
    began: float
    """time.monotonic()."""
    events: list[tuple[float, str, dict[str, Any] | Decision]] = field(default_factory=list)
    left_out: int = 0

    def add(self, now: float, what: str, **facts: Any) -> None:
        """Something happened."""
        self._keep(now, what, facts)

    def decided(self, now: float, decision: Decision) -> None:
        """Replicas were chosen."""
        self._keep(now, "decided", decision)

    def _keep(self, now: float, what: str, facts: dict[str, Any] | Decision) -> None:
        if len(self.events) < MAX_EVENTS:
            self.events.append((now, what, facts))
        else:
            self.left_out += 1

    def told(self) -> dict[str, Any]:
        """As JSON."""
        return {"request_id": self.id, "prompt_tokens": self.prompt_tokens, "left_out": self.left_out, "events": [
            {"seconds": round(now - self.began, 6), "event": what, **(_told(facts) if isinstance(facts, Decision) else facts)}
            for now, what, facts in self.events]}


def _told(decision: Decision) -> dict[str, Any]:
    chosen = decision.prefill, decision.decode
    return {"policy": decision.policy, "prefill": decision.prefill.name if decision.prefill else None,
            "decode": decision.decode.name, "local": decision.local, "reason": decision.reason,
            "computed_tokens": decision.computed_tokens, "transfer_seconds": decision.transfer_seconds,
            "load_from": decision.load.source.name if decision.load else None,
            "load_tokens": decision.load.tokens if decision.load else 0,
            "candidates": [_score(score) | {"chosen": any(score[0] is one for one in chosen)} for score in decision.scores]}


def _score(score: Score) -> dict[str, Any]:
    return {**dict(zip(SCORE, score, strict=True)), "replica": score[0].name, "role": score[0].role.value}


class Traces:
    """The last so many requests."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[str, Trace] = OrderedDict()

    def begin(self, id: str, prompt_tokens: int, now: float) -> Trace:
        """A request came; the oldest one goes."""
        trace = Trace(id=id, prompt_tokens=prompt_tokens, began=now)
        if self._most:
            self._kept[id] = trace
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return trace

    def find(self, name: str) -> Trace | None:
        """By our id, by the id that the client gave (its latest request), or by the id of the answer (`chatcmpl-...`)."""
        if found := self._kept.get(name):
            return found
        unique = name.rpartition("-")[2]
        return next((trace for id, trace in reversed(self._kept.items())
                     if id.rpartition("-req-")[0] == name or id.rpartition("-")[2] == unique != ""), None)
