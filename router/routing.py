"""Chooses replicas for a request's runs: asks the policy, with what the index knows of the prompt. Knows no connection."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from router.explain import Trace, Traces
from router.policies import Decision, PrefixLoad, Question, choose, prefix_load
from router.policy import Replica, missing
from router.prefix_index import BYTES_A_KEY, PrefixIndex
from router.prompt import Prompt
from slipstream import block_hash, cache_keys
from slipstream.block_hash import PictureRows
from slipstream.checkpoint import Checkpoint
from slipstream.config import RouterConfig
from slipstream.observability.metrics import RouterMetrics

INDEXED = ("prefix", "auto")
"""Policies that want to know what caches hold."""
LOAD_PAUSE_SECONDS = 30.0
"""After a load that failed or was late, between its two replicas."""


@dataclass(kw_only=True)
class Wanted:
    """What routing knows of a request."""

    prompt: Prompt
    salt: str
    choices: int
    trace: Trace
    pictures: tuple[PictureRows, ...] = ()
    keys: list[int] = field(default_factory=list)
    """Of the last run that was placed."""


class Routing:
    """One per router."""

    def __init__(self, config: RouterConfig, checkpoint: Checkpoint, metrics: RouterMetrics) -> None:
        self._policy = config.policy
        self._config = config.routing
        self._local = config.empty_prefill_pool == "local"
        self._checkpoint = checkpoint
        self._metrics = metrics
        self.index = (PrefixIndex(self._config.index_bytes // BYTES_A_KEY, self._config.predict_seconds)
                      if config.policy in INDEXED else None)
        """None: this policy asks no cache."""
        if self.index is not None:
            metrics.prefix_keys.set_function(self.index.__len__)
        self.traces = Traces(self._config.decisions)
        self._failed_loads: dict[tuple[str, str], float] = {}  # until when, by source and target

    @property
    def load_seconds(self) -> float:
        """Longest wait for what a prefill replica loads."""
        return self._config.load_seconds

    def missing(self, replicas: Sequence[Replica]) -> str:
        """Why no request could be served, or empty."""
        return missing(replicas, local=self._local)

    def wanted(self, id: str, prompt: Prompt, salt: str, choices: int) -> Wanted:
        """A request comes."""
        vision, pictures = self._checkpoint.vision, prompt.pictures
        rows = () if vision is None or not pictures else cache_keys.picture_rows(
            prompt.tokens, [one.grid for one in pictures], [one.content_hash for one in pictures],
            image_token_id=self._checkpoint.image_token_id, video_token_id=self._checkpoint.video_token_id,
            merge_size=vision.merge_size)
        return Wanted(prompt=prompt, salt=salt, choices=choices, pictures=rows,
                      trace=self.traces.begin(id, len(prompt.tokens), time.monotonic()))

    def place(self, wanted: Wanted, replicas: Sequence[Replica], *, turn: int, doubts: Mapping[str, int] | None = None,
              output: tuple[int, ...] = (), whole: bool = False) -> Decision:
        """Choose for a run; its prompt counts as cached there from now on. `whole`: all of it is computed, whatever is cached.
        Raises UnavailableError saying what is missing."""
        tokens, index = wanted.prompt.tokens + output, self.index
        hits = {}
        if index is not None and replicas and (size := replicas[0].block_size):
            wanted.keys = cache_keys.short(block_hash.prompt_keys(tokens, size, salt=wanted.salt, pictures=wanted.pictures))
            hits = {} if whole else dict(index.match(wanted.keys, (len(tokens) - 1) // size))
        question = Question(tokens=len(tokens), turn=turn, text_only=not wanted.prompt.pictures, choices=wanted.choices,
                            hits=hits, doubts=doubts or {})
        decision = choose(replicas, question, self._policy, self._config, local=self._local)
        now = time.monotonic()
        decision.load = self._load(decision, question, replicas, wanted.keys, now)
        wanted.trace.decided(now, decision)
        if decision.local:
            self._metrics.local_prefills.labels(decision.local).inc()
        self.goes_to(wanted, decision.prefill, now)
        self.goes_to(wanted, decision.decode, now)
        return decision

    def _load(self, decision: Decision, question: Question, replicas: Sequence[Replica], keys: Sequence[int], now: float
              ) -> PrefixLoad | None:
        """What is loaded has to be there: where prompts were sent counts for the choice of replicas, and not for this."""
        if self.index is None or decision.prefill is None:
            return None
        able = [one for one in replicas if self._failed_loads.get((one.id, decision.prefill.id), 0.0) <= now]
        if prefix_load(decision, question, able, question.hits, self._config) is None:
            return None
        told = self.index.match(keys, (question.tokens - 1) // (decision.prefill.block_size or 1), predicted=False)
        return prefix_load(decision, question, able, told, self._config)

    def load_failed(self, source: str, target: str) -> None:
        """Nothing is loaded from `source` to `target` for a while: the next one could fail as slowly."""
        now = time.monotonic()
        self._failed_loads = {pair: until for pair, until in self._failed_loads.items() if until > now}
        self._failed_loads[source, target] = now + LOAD_PAUSE_SECONDS

    def goes_to(self, wanted: Wanted, replica: Replica | None, now: float) -> None:
        """A replica will soon hold the prompt."""
        if self.index is not None and replica is not None and wanted.keys:
            computable = (len(wanted.prompt.tokens) - 1) // replica.block_size
            self.index.predict(wanted.keys, (replica.id,), now, snapshot=computable if replica.needs_snapshots else 0)
