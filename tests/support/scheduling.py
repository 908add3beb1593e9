"""A scheduler over real pools without any tensor, sequences for it, and steps whose draws a test chooses."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from slipstream.block_hash import prompt_keys
from slipstream.engine.block_pool import BlockPool
from slipstream.engine.memory import Memory
from slipstream.engine.prefix_cache import PrefixCache
from slipstream.engine.scheduler import Scheduler, StepPlan
from slipstream.engine.sequence import GenerationRequest, Sequence
from slipstream.engine.state_pool import StatePool
from slipstream.types import RequestId, SamplingParams, StopParams, TokenEvent

STOP = 7


class Copies:
    """A Copier that writes down what it is told."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int, int]] = []

    def copy_block(self, source: int, target: int) -> None:
        self.made.append(("block", source, target))

    def copy_state(self, source: int, target: int) -> None:
        self.made.append(("state", source, target))


def scheduler(*, blocks: int = 64, block_size: int = 4, slots: int = 8, max_running: int = 8, budget: int = 32, chunk: int = 0,
              parked_fraction: float = 1.0, growth: int = 1000, snapshots: int = 0, cache: bool = True,
              drafts: int = 0) -> Scheduler:
    pool = BlockPool(blocks, block_size)
    memory = Memory(pool, StatePool(slots), PrefixCache(pool, StatePool(snapshots, first=slots), enabled=cache), Copies(),
                    growth_tokens=growth, draft_tokens=drafts)
    return Scheduler(memory, max_running=max_running, max_batch_tokens=budget, chunk_tokens=chunk,
                     parked_fraction=parked_fraction)


def sequence(name: str, prompt: int, outputs: int = 1, *, split: bool = False, ready: bool = False,
             ignore_eos: bool = False, choices: tuple[int, ...] = (0,), output: tuple[int, ...] = (), priority: int = 0,
             tokens: SequenceOf[int] = (), block_size: int = 4) -> Sequence:
    """With a prompt of its own, which is never found in a cache, unless `tokens` are given."""
    request = GenerationRequest(
        id=RequestId(name=name), tokens=tuple(tokens or range(100, 100 + prompt)), sampling=SamplingParams(), choices=choices,
        output=output, priority=priority,
        stop=StopParams(max_tokens=outputs, stop_token_ids=frozenset({STOP}), ignore_eos=ignore_eos))
    keys = prompt_keys(request.tokens + request.output, block_size) if tokens else None
    return Sequence(request=request, split=split, max_outputs=outputs, ready=ready, keys=keys)


def step(of: Scheduler, now: float = 0.0, token: int = 1) -> tuple[StepPlan, list[TokenEvent]]:
    """Plan a step and carry it out; every draw gives `token`."""
    plan = of.plan(now)
    events = []
    for chunk in plan.chunks:
        events += of.advance(chunk, [token] * len(chunk.sequence.choices) if chunk.samples else [], now)
    of.check_integrity()
    return plan, events


def work(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(chunk.sequence.id.name, chunk.start, chunk.count) for chunk in plan.chunks]
