"""Suite `routing`: the router's policies and prefix index over simulated workers, on a synthetic trace of Mooncake's format.

Half of the workers prefill, one prompt after the other, the others decode; each keeps what it saw, least recently used first
out. Time is simulated, decisions are real. A hit is a token that was cached where its prompt was computed, when that began;
the oracle is one cache as large as those of all prefill workers together. Imbalance is the most that a worker did, over the
mean.
sglang-router is not in it: its policy cannot be asked without its HTTP server and workers of its own.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.harness import Result
from bench.trace import BLOCK_TOKENS, Request, synthetic
from router.policies import POLICIES, Question, choose
from router.policy import Replica
from router.prefix_index import PrefixIndex
from slipstream import block_hash, cache_keys
from slipstream.config_routing import RoutingConfig
from slipstream.types import Role

PREFILL_TOKENS_PER_SECOND = 20_000.0
ITL_SECONDS = 0.02
CACHE_BLOCKS = 1200
MAX_RUNNING = 128
UTILISATION = 0.6
"""Of the prefill workers, if every hit of the oracle were one."""
CONFIG = RoutingConfig()
ORACLE = "one big cache"
KV_BYTES = 147_456
"""Of a token, as in Qwen3-8B."""


class Cache:
    """Blocks by hash, least recently used first out."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[int, None] = OrderedDict()

    def hit(self, ids: Sequence[int]) -> int:
        """How many of the first are here."""
        return next((i for i, name in enumerate(ids) if name not in self._kept), len(ids))

    def keep(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """They were used; which of them came, and which others went."""
        new = [name for name in ids if name not in self._kept]
        for name in reversed(ids):  # the deepest goes first
            self._kept[name] = None
            self._kept.move_to_end(name)
        gone = [self._kept.popitem(last=False)[0] for _ in range(max(0, len(self._kept) - self._most))]
        return [name for name in new if name in self._kept], gone


@dataclass(eq=False, kw_only=True)
class Worker:
    """One simulated replica, with what the router knows of it."""

    view: Replica
    cache: Cache = field(default_factory=lambda: Cache(CACHE_BLOCKS))
    queue: deque[Job] = field(default_factory=deque)
    job: Job | None = None
    done: float = 0.0
    """Tokens that it computed, or drew."""
    number: int = 0

    def load(self) -> None:
        """Tell it."""
        view = self.view
        if view.role is Role.PREFILL:
            view.waiting, view.running = len(self.queue), int(self.job is not None)
            view.waiting_tokens = sum(job.left for job in self.queue)


@dataclass(eq=False, kw_only=True)
class Job:
    """One request on its way."""

    request: Request
    whole: tuple[int, ...]
    prefill: Worker
    decode: Worker
    guessed: int
    """Tokens that the router took for uncached."""
    left: int = 0
    """Tokens that were not cached when it came to prefill."""


@dataclass(kw_only=True)
class Run:
    """A trace under one policy."""

    policy: str
    workers: list[Worker]
    hit_tokens: int = 0
    tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    decided: list[float] = field(default_factory=list)
    """CPU seconds: look-up and choice."""
    noted: list[float] = field(default_factory=list)
    """To note what was routed."""

    def __post_init__(self) -> None:
        self.by_id = {worker.view.id: worker for worker in self.workers}
        self.index = PrefixIndex(1 << 18, 10.0)
        for worker in self.workers:
            self.index.add(worker.view.id)
            self.tell(worker, [], [])
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.order = itertools.count()

    def at(self, when: float, what: Callable[[float], None]) -> None:
        """Later."""
        heapq.heappush(self.events, (when, next(self.order), what))

    def tell(self, worker: Worker, new: Sequence[int], gone: Sequence[int]) -> None:
        """What a worker says of its cache, and its load, with a report."""
        worker.number += 1
        self.index.hear(worker.view.id, worker.number, reset=worker.number == 1, blocks=new, removed=gone)
        worker.load()

    def simulate(self, trace: Sequence[Request]) -> None:
        """All of it."""
        for turn, request in enumerate(trace):
            when = request.timestamp / 1000
            while self.events and self.events[0][0] <= when:
                at, _, what = heapq.heappop(self.events)
                what(at)
            self.arrive(request, turn, when)
        while self.events:
            at, _, what = heapq.heappop(self.events)
            what(at)

    def arrive(self, request: Request, turn: int, now: float) -> None:
        """Route it."""
        views = [worker.view for worker in self.workers]
        whole = request.hash_ids[: request.input_length // BLOCK_TOKENS]
        start = time.thread_time()
        hits = self.index.match(whole, 0) if self.policy in ("auto", "prefix") else {}
        decision = choose(views, Question(tokens=request.input_length, turn=turn, hits=hits), self.policy, CONFIG)
        middle = time.thread_time()
        assert decision.prefill is not None
        if self.policy in ("auto", "prefix"):
            self.index.predict(whole, (decision.prefill.id, decision.decode.id), now)
        self.noted.append(time.thread_time() - middle)
        self.decided.append(middle - start)
        job = Job(request=request, whole=whole, prefill=self.by_id[decision.prefill.id],
                  decode=self.by_id[decision.decode.id], guessed=decision.computed_tokens)
        job.prefill.view.in_flight += 1
        job.prefill.view.pending_tokens += job.guessed
        job.decode.view.in_flight += 1
        job.left = request.input_length - job.prefill.cache.hit(whole) * BLOCK_TOKENS
        job.prefill.queue.append(job)
        job.prefill.load()
        self.start(job.prefill, now)

    def start(self, worker: Worker, now: float) -> None:
        """Compute the next prompt."""
        if worker.job is not None or not worker.queue:
            return
        job = worker.job = worker.queue.popleft()
        worker.load()
        cached = min(worker.cache.hit(job.whole) * BLOCK_TOKENS, job.request.input_length - 1)
        computed = job.request.input_length - cached
        self.hit_tokens += cached
        self.tokens += job.request.input_length
        worker.done += computed
        self.at(now + computed / PREFILL_TOKENS_PER_SECOND, lambda when: self.computed(job, when))

    def computed(self, job: Job, now: float) -> None:
        """The first token; decode goes on."""
        worker = job.prefill
        worker.job = None
        worker.view.in_flight -= 1
        worker.view.pending_tokens -= job.guessed
        self.tell(worker, *worker.cache.keep(job.whole))
        self.ttft.append(now - job.request.timestamp / 1000)
        job.decode.view.running += 1
        self.tell(job.decode, *job.decode.cache.keep(job.whole))
        job.decode.done += job.request.output_length
        self.at(now + job.request.output_length * ITL_SECONDS, lambda when: self.ended(job))
        self.start(worker, now)

    def ended(self, job: Job) -> None:
        """The last token."""
        job.decode.view.in_flight -= 1
        job.decode.view.running -= 1

    def imbalance(self, role: Role) -> float:
        """Most, over the mean."""
        did = [worker.done for worker in self.workers if worker.view.role is role]
        return max(did) / statistics.mean(did)


def workers(count: int) -> list[Worker]:
    """Half of each role."""
    return [Worker(view=Replica(id=f"{role.value}-{number}", role=role, compatibility_hash="", block_size=BLOCK_TOKENS,
                                max_running=MAX_RUNNING, channels=frozenset({"rdma/nixl"}), kv_bytes_per_token=KV_BYTES,
                                total_blocks=CACHE_BLOCKS, free_blocks=CACHE_BLOCKS,
                                tokens_per_second=PREFILL_TOKENS_PER_SECOND))
            for role in Role for number in range(count // 2)]


def oracle(trace: Sequence[Request], count: int) -> float:
    """Share of the tokens that one cache would have, at the moment that each request comes."""
    cache, hit = Cache(CACHE_BLOCKS * count // 2), 0
    for request in trace:
        whole = request.hash_ids[: request.input_length // BLOCK_TOKENS]
        hit += min(cache.hit(whole) * BLOCK_TOKENS, request.input_length - 1)
        cache.keep(whole)
    return hit / sum(request.input_length for request in trace)


def run(quick: bool) -> Result:
    """`quick`: a tenth of the requests, 16 workers alone."""
    rows: list[dict[str, str | float]] = []
    ratios: dict[str, float] = {}
    for count in (16,) if quick else (4, 8, 16):
        requests = 1000 if quick else 6000
        probe = synthetic(1, requests, 1.0)
        needed = sum(request.input_length for request in probe) * (1 - oracle(probe, count)) / requests
        trace = synthetic(1, requests, UTILISATION * PREFILL_TOKENS_PER_SECOND * (count // 2) / needed)
        best = oracle(trace, count)
        rows.append({"workload": "synthetic", "workers": count, "method": ORACLE, "hit": best})
        for policy in POLICIES:
            one = Run(policy=policy, workers=workers(count))
            one.simulate(trace)
            hit = one.hit_tokens / one.tokens
            decided = 1e6 * statistics.median(one.decided)
            rows.append({
                "workload": "synthetic", "workers": count, "method": policy, "hit": hit, "hit_of_oracle": hit / best,
                "prefill_imbalance": one.imbalance(Role.PREFILL), "decode_imbalance": one.imbalance(Role.DECODE),
                "decision_us": decided, "decision_us_p99": 1e6 * statistics.quantiles(one.decided, n=100)[98],
                "note_us": 1e6 * statistics.median(one.noted), "ttft_s": statistics.median(one.ttft),
                "ttft_s_p99": statistics.quantiles(one.ttft, n=100)[98]})
            ratios |= {f"{policy}/oracle hit, {count}": hit / best, f"{policy} imbalance, {count}": one.imbalance(Role.PREFILL)}
            if policy == "auto":
                ratios[f"auto us, {count}"] = decided
    return Result(name="routing", rows=[*rows, *_keys()], ratios=ratios)


def _keys() -> list[dict[str, str | float]]:
    """What a prompt of 8k tokens costs in blocks of 16: its keys, and their look-up where all of 16 workers have all."""
    tokens, index = tuple(range(8192)), PrefixIndex(1 << 18, 10.0)
    found, asked = [], []
    keys = cache_keys.short(block_hash.prompt_keys(tokens, 16))
    for number in range(16):
        index.add(str(number))
        index.hear(str(number), 1, reset=True, blocks=keys)
    for _ in range(50):
        start = time.thread_time()
        cache_keys.short(block_hash.prompt_keys(tokens, 16))
        middle = time.thread_time()
        index.match(keys, 511)
        found.append(middle - start)
        asked.append(time.thread_time() - middle)
    return [{"workload": "8k tokens in blocks of 16", "workers": 16, "method": name,
             "decision_us": 1e6 * statistics.median(seconds)} for name, seconds in (("keys", found), ("look-up", asked))]
