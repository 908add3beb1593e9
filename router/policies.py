"""Which replicas serve a run, by a policy that is chosen by name; every decision comes with its reasons. Pure.

A policy sees the replicas that may serve, what each has cached of the prompt, and returns one pair of them, or a decode replica
alone, which then computes the prompt too. docs/routing.md explains the policies and the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from router.policy import Replica, missing, refusal
from slipstream.config_routing import RoutingConfig
from slipstream.errors import UnavailableError
from slipstream.types import Role

TOKENS_PER_SECOND = 10_000.0
"""Of a prefill replica, while none has measured its own."""
BYTES_PER_SECOND = {"local": 10e9, "rdma": 20e9, "grpc": 1e9}
"""What a transfer is taken to move by each channel."""
SLOW = 2.0
"""Replicas count as equally fast unless one is so many times slower: less may be what they happened to compute."""
EXPOSED = 0.1
"""Part of a transfer's time that is not hidden behind the computation of its prompt."""
HANDOFF_SECONDS = 0.002
"""Of a transfer, whatever it moves."""
BUSY_SECONDS = 1.0
"""What it costs to be refused by a decode replica for want of memory, and to come again."""
IMBALANCE = 1.5, 4
"""`prefix` follows a prefix to a replica with at most so many times the least load, and so many requests more."""
USUAL_RUNNING = 64
"""Sequences, of a replica that does not tell how many it can run."""
@dataclass(kw_only=True, slots=True)
class Question:
    """What a policy is asked: for one run of a request."""

    tokens: int
    """To be computed: the prompt, and in a resumed run its output so far."""
    turn: int = 0
    """Breaks ties in rotation."""
    text_only: bool = True
    choices: int = 1
    hits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By replica id: blocks of the prompt that it holds, and at how many of them its last snapshot is."""
    doubts: Mapping[str, int] = field(default_factory=dict)
    """By replica id, how much speaks against it: of each role only the least doubtful ones are candidates."""


Score = tuple[Replica, int, int, float, float, float, float]
"""A candidate as a policy saw it, by the names of SCORE; a plain tuple, as there are many of them in every decision."""
SCORE = "replica", "cached_tokens", "load", "cost_seconds", "queue_seconds", "compute_seconds", "memory"
"""Seconds are of `auto` alone; memory is the share of a decode replica's blocks that would be used."""


@dataclass(kw_only=True, slots=True)
class PrefixLoad:
    """What prefill loads into its cache before it computes."""

    source: Replica
    """A decode replica that has it."""
    tokens: int
    """Beyond what prefill has."""


@dataclass(kw_only=True, slots=True)
class Decision:
    """Who serves a run. Not frozen, which would make it three times as slow to make."""

    policy: str
    prefill: Replica | None
    """None: the decode replica computes the prompt."""
    decode: Replica
    reason: str
    computed_tokens: int
    """Of the prompt, what is probably not cached where it is computed."""
    local: str = ""
    """Why decode computes the prompt: `short`, `cached` or `empty_pool`."""
    transfer_seconds: float = 0.0
    scores: Sequence[Score] = ()
    load: PrefixLoad | None = None
    """`computed_tokens` are without it."""


Policy = Callable[[Question, Sequence[Replica], Sequence[Replica], RoutingConfig], Decision]
"""Takes usable prefill replicas and usable decode replicas, of which at least one pair fits."""


def choose(replicas: Sequence[Replica], question: Question, policy: str, config: RoutingConfig, *, local: bool = False
           ) -> Decision:
    """Decide. `local`: without any prefill replica a decode replica computes texts too.

    Raises UnavailableError saying what is missing.
    """
    prefills, decodes, computes = list[Replica](), list[Replica](), Role.PREFILL
    for one in replicas:
        if not one.draining:
            (prefills if one.role is computes else decodes).append(one)
    if question.doubts:
        prefills = _least_doubtful(prefills, question.doubts, lambda some: _any_fits(some, decodes))
        decodes = _least_doubtful(decodes, question.doubts, lambda some: _any_fits(prefills, some))
    if not prefills and local and question.text_only and (able := [one for one in decodes if one.computes_prompts]):
        decode = _least(able, question.turn)
        return Decision(policy=policy, prefill=None, decode=decode, local="empty_pool", reason=(
            "no prefill replica is connected, and router.empty_prefill_pool is \"local\""),
            computed_tokens=question.tokens - _cached(decode, question, computes=True))
    if not _any_fits(prefills, decodes):
        raise refusal(missing(replicas))
    return POLICIES[policy](question, prefills, decodes, config)


def another_decode(replicas: Sequence[Replica], prefill: Replica | None, *, not_now: Collection[str], turn: int) -> Replica:
    """Where to go on when a decode replica was busy: somebody else if there is, else the same one again. Without `prefill` it
    computes the prompt too."""
    fitting = [replica for replica in replicas if not replica.draining and replica.role is Role.DECODE
               and (replica.computes_prompts if prefill is None else prefill.fits(replica))]
    if not fitting:
        raise UnavailableError("no decode replica is left that could continue the request", retry_after_seconds=1.0)
    others = [replica for replica in fitting if replica.id not in not_now]
    return _least(others or fitting, turn)


def prefix_load(decision: Decision, question: Question, replicas: Sequence[Replica], held: Mapping[str, tuple[int, int]],
                config: RoutingConfig) -> PrefixLoad | None:
    """What the chosen prefill replica should load, of the decode replica that has most: enough of it, and quicker to move than
    to compute, by the weight of `auto`. `held`: as `hits` of the question, which say what prefill has."""
    prefill, found = decision.prefill, list[PrefixLoad]()
    if prefill is None or not config.load_tokens:
        return None
    known = _cached(prefill, question, computes=True)
    for one in replicas:
        if one.role is Role.DECODE and not one.draining and one.id not in question.doubts and prefill.fits(one):
            more = _cached(one, replace(question, hits=held), computes=True) - known
            if more >= config.load_tokens:
                found.append(PrefixLoad(source=one, tokens=more))
    if not found:
        return None
    best = max(found, key=lambda one: (one.tokens, -one.source.load))
    near = bool(prefill.host) and prefill.host == best.source.host
    moved = (prefill.kv_bytes_per_token * best.tokens + prefill.state_bytes) / _bytes_per_second(
        prefill.channels, best.source.channels, near)
    saved = best.tokens / (prefill.tokens_per_second or TOKENS_PER_SECOND) * config.compute_weight
    return best if 2 * HANDOFF_SECONDS + moved < saved else None


# Policies ----------------------------------------------------------------------------------------------------------------


def round_robin(question: Question, prefills: Sequence[Replica], decodes: Sequence[Replica], config: RoutingConfig) -> Decision:
    """One after the other."""
    prefills = [one for one in prefills if _any_fits((one,), decodes)]
    prefill = prefills[question.turn % len(prefills)]
    fitting = [one for one in decodes if prefill.fits(one)]
    return _decided("round_robin", question, prefill, fitting[question.turn // len(prefills) % len(fitting)],
                    prefills, decodes, f"turn {question.turn}")


def least_load(question: Question, prefills: Sequence[Replica], decodes: Sequence[Replica], config: RoutingConfig) -> Decision:
    """The fewest requests on each side; of equals the one with more free memory, then in turn."""
    prefill = _least([one for one in prefills if _any_fits((one,), decodes)], question.turn)
    decode = _least([one for one in decodes if prefill.fits(one)], question.turn)
    return _decided("least_load", question, prefill, decode, prefills, decodes, "the fewest requests on each side")


def prefix(question: Question, prefills: Sequence[Replica], decodes: Sequence[Replica], config: RoutingConfig) -> Decision:
    """Where most of the prompt is cached, unless that replica has far more to do than another."""
    prefill, followed = _warmest([one for one in prefills if _any_fits((one,), decodes)], question, computes=True)
    decode, too = _warmest([one for one in decodes if prefill.fits(one)], question, computes=False)
    how = {True: "the longest cached beginning", False: "the fewest requests: where more is cached, the load is too high"}
    return _decided("prefix", question, prefill, decode, prefills, decodes, f"prefill: {how[followed]}; decode: {how[too]}")


def auto(question: Question, prefills: Sequence[Replica], decodes: Sequence[Replica], config: RoutingConfig) -> Decision:
    """The least of the seconds until the request decodes, with what it costs those that decode beside it."""
    tokens = question.tokens
    usual = max([one.tokens_per_second for one in prefills]) or TOKENS_PER_SECOND
    computing = sorted(_computing(prefills, question, config, usual))  # no two scores are compared: the places differ
    landing = sorted(_landing(decodes, question, config))
    scores = [score for _, _, score in computing + landing]
    best = float("inf")
    found: tuple[Score, Score, float] | None = None
    for landed_cost, _, landed in landing:
        one = landed[0]
        for cost, _, score in computing:
            if cost + landed_cost + HANDOFF_SECONDS >= best:
                break  # no transfer takes less
            if score[0].fits(one):
                moved = _transfer_seconds(score, one, landed[1], tokens)
                if (total := cost + landed_cost + moved) < best:
                    best, found = total, (score, landed, moved)
    alone: tuple[float, int, Replica] | None = None
    if config.local_prefill_tokens and question.text_only:
        for landed_cost, _, landed in landing:
            one = landed[0]
            rest = tokens - _cached(one, question, computes=True)
            if one.computes_prompts and rest <= config.local_prefill_tokens:
                weight = config.compute_weight + config.stall_weight * one.running
                here = landed_cost + (one.queued_tokens + rest * weight) / usual
                if alone is None or here < alone[0]:
                    alone = here, rest, one
    assert found is not None, "one pair fits"
    if alone is not None and alone[0] < best:
        here, rest, one = alone
        return Decision(policy="auto", prefill=None, decode=one, local="short" if rest == tokens else "cached",
                        reason=f"{rest} of {tokens} tokens are left to compute there: {here:.4f} s against {best:.4f} s",
                        computed_tokens=rest, scores=scores)
    score, landed, moved = found
    return Decision(policy="auto", prefill=score[0], decode=landed[0], computed_tokens=tokens - score[1],
                    reason="the least cost of all pairs", transfer_seconds=moved, scores=scores)


POLICIES: dict[str, Policy] = {"auto": auto, "round_robin": round_robin, "least_load": least_load, "prefix": prefix}
"""By the names of `router.policy`."""


# Parts -------------------------------------------------------------------------------------------------------------------


def _least_doubtful(replicas: list[Replica], doubts: Mapping[str, int], will_do: Callable[[list[Replica]], bool]
                    ) -> list[Replica]:
    for level in sorted({doubts.get(one.id, 0) for one in replicas}):
        if will_do(some := [one for one in replicas if doubts.get(one.id, 0) <= level]):
            return some
    return replicas


def _any_fits(prefills: Sequence[Replica], decodes: Sequence[Replica]) -> bool:
    for one in prefills:
        for other in decodes:
            if one.fits(other):
                return True
    return False


def _cached(one: Replica, question: Question, *, computes: bool) -> int:
    """Tokens of the prompt that it need not compute, or be sent."""
    if not (hit := question.hits.get(one.id)):
        return 0
    size = one.block_size or 1
    return min(hit[one.needs_snapshots], (question.tokens - 1) // size) * size if computes else hit[0] * size


def _computing(prefills: Sequence[Replica], question: Question, config: RoutingConfig, usual: float
               ) -> list[tuple[float, int, Score]]:
    """By prefill replica (cost, place in turn): what its queue, its load and the computation cost."""
    tokens, hits, turn, weight, balance = (question.tokens, question.hits, question.turn, config.compute_weight,
                                           config.balance_seconds)
    count, slow = len(prefills), usual / SLOW
    found = []
    for place, one in enumerate(prefills, -turn):
        cached, speed, load = 0, one.tokens_per_second, one.load
        if hit := hits.get(one.id):
            size = one.block_size or 1
            cached = min(hit[one.needs_snapshots], (tokens - 1) // size) * size
        rate = speed if 0 < speed < slow else usual
        queue, compute = one.queued_tokens / rate, (tokens - cached) / rate
        cost = queue + compute * weight + balance * load / (one.max_running or USUAL_RUNNING)
        found.append((cost, place % count, (one, cached, load, cost, queue, compute, 0.0)))
    return found


def _landing(decodes: Sequence[Replica], question: Question, config: RoutingConfig) -> list[tuple[float, int, Score]]:
    """By decode replica (cost, place in turn): what its load and its memory cost."""
    tokens, hits, turn, more, balance = (question.tokens, question.hits, question.turn, question.choices - 1,
                                         config.balance_seconds)
    count = len(decodes)
    found = []
    for place, one in enumerate(decodes, -turn):
        hit, size, load, total = hits.get(one.id), one.block_size or 1, one.load, one.total_blocks
        depth, memory = hit[0] if hit else 0, 0.0
        cost = balance * (load + more) / (one.max_running or USUAL_RUNNING)
        if total:
            memory = 1 - (one.free_blocks - (-(-tokens // size) + more + 1 - depth)) / total
            cost += balance * memory if memory <= 1 else BUSY_SECONDS * memory
        found.append((cost, place % count, (one, depth * size, load, cost, 0.0, 0.0, memory)))
    return found


def _transfer_seconds(score: Score, decode: Replica, cached: int, tokens: int) -> float:
    """Of a pair: what is not hidden behind the computation. A constant where the replicas do not tell their bytes."""
    prefill = score[0]
    moved = prefill.kv_bytes_per_token * (tokens - cached) + prefill.state_bytes
    if moved <= 0:
        return HANDOFF_SECONDS
    near = bool(prefill.host) and prefill.host == decode.host
    seconds = moved / _bytes_per_second(prefill.channels, decode.channels, near)
    return HANDOFF_SECONDS + max(seconds - score[5], EXPOSED * seconds)


@lru_cache(256)
def _bytes_per_second(here: frozenset[str], there: frozenset[str], near: bool) -> float:
    """By the best channel that both have; `local` reaches over one machine only."""
    common = here & there
    if near and "local" in common:
        return BYTES_PER_SECOND["local"]
    return BYTES_PER_SECOND["rdma" if any(name.startswith("rdma") for name in common) else "grpc"]


def _least(fitting: Sequence[Replica], turn: int) -> Replica:
    start = turn % len(fitting)
    rotated = [*fitting[start:], *fitting[:start]]
    return min(rotated, key=lambda replica: (replica.load, -replica.free_blocks))


def _warmest(fitting: Sequence[Replica], question: Question, *, computes: bool) -> tuple[Replica, bool]:
    """The one that has most of the prompt, if its load allows; else the least loaded. True: the first."""
    least = _least(fitting, question.turn)
    cached, _, place = max((_cached(one, question, computes=computes), -one.load, -place) for place, one in enumerate(fitting))
    warmest = fitting[-place]
    times, more = IMBALANCE
    if cached <= _cached(least, question, computes=computes):
        return least, True
    too_much = warmest.load > least.load * times and warmest.load > least.load + more
    return (least, False) if too_much else (warmest, True)


def _decided(policy: str, question: Question, prefill: Replica, decode: Replica, prefills: Sequence[Replica],
             decodes: Sequence[Replica], reason: str) -> Decision:
    scores: list[Score] = [(one, _cached(one, question, computes=computes), one.load, 0.0, 0.0, 0.0, 0.0)
                           for side, computes in ((prefills, True), (decodes, False)) for one in side]
    return Decision(policy=policy, prefill=prefill, decode=decode, reason=reason, scores=scores,
                    computed_tokens=question.tokens - _cached(prefill, question, computes=True))
