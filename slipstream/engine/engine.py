"""One rank's engine: requests in, tokens out, one step at a time. Knows no network and no role; not thread-safe.

Ledger: a block or slot belongs to the free list, the prefix cache, a sequence (computing, decoding), a reservation (its bytes
are arriving) or a transfer (its bytes are leaving). It goes back with the last token, `release` (transfers), `abort`, a
preemption, or a failed step; whole blocks of what was computed stay in the cache until their room is needed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import methodcaller

import torch

from slipstream.checkpoint import Checkpoint
from slipstream.config import EngineConfig
from slipstream.engine import caches as cache_memory
from slipstream.engine.block_pool import BlockPool
from slipstream.engine.executor import RankExecutor
from slipstream.engine.gang import LeadingExecutor, Log
from slipstream.engine.ledger import Owner
from slipstream.engine.lending import borrowed, lent
from slipstream.engine.memory import Memory
from slipstream.engine.params import check_params
from slipstream.engine.prefix_cache import CacheChanges, PrefixCache
from slipstream.engine.prompt import Pixels, Prompt, Publisher, block_keys, prepare
from slipstream.engine.results import Reservation, StepResult
from slipstream.engine.runner import Run, Runner, RunResult, as_failure
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.sequence import GenerationRequest, Matcher, State, Timing
from slipstream.engine.sequence import Sequence as EngineSequence
from slipstream.engine.state_pool import StatePool
from slipstream.errors import (
    ConfigError,
    ContextLengthError,
    InternalError,
    InvalidRequestError,
    PreemptedError,
    SlipstreamError,
)
from slipstream.layers.batch import LayerCache
from slipstream.layers.parallel import Communicator
from slipstream.models.registry import LanguageModel, VisionModel
from slipstream.types import EngineCounters, EngineLoad, MropeState, RequestId, TokenEvent

_PREEMPTED = "this replica needed the memory of its youngest request; resume it from the tokens so far"

__all__ = ["Engine", "GenerationRequest", "Publisher", "Reservation", "StepResult", "Timing"]


class Engine:
    """Continuous batching over one model and its paged caches."""

    def __init__(self, model: LanguageModel, checkpoint: Checkpoint, config: EngineConfig, *, parked_fraction: float = 1.0,
                 state_snapshots: int | None = None, dtype: torch.dtype = torch.float32, device: torch.device | None = None,
                 comm: Communicator | None = None, log: Log | None = None, draft_tokens: int = 0,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """`dtype`: of the KV and conv caches, the model's own. `parked_fraction`: share of the blocks, and of the slots, that
        prompts without a ready destination may hold. `state_snapshots`: None as `config` says. `comm`, `log`: of rank 0 of a
        replica of several ranks. `draft_tokens`: the most that a sequence gets in a step, of a checkpoint with the layer that
        drafts. Raises ConfigError."""
        if config.max_running > config.max_batch_tokens:
            raise ConfigError(f"engine.max_running ({config.max_running}) must not exceed engine.max_batch_tokens "
                              f"({config.max_batch_tokens})", field="engine.max_running")
        device = device or torch.device("cpu")
        snapshots = cache_memory.num_snapshots(checkpoint, config, state_snapshots)
        running = cache_memory.num_state_slots(checkpoint, config, draft_tokens)
        layers = checkpoint.layers if comm is None else comm.shard.specs(checkpoint.layers)
        self.caches: tuple[LayerCache, ...] = cache_memory.allocate(layers, config, running + snapshots, dtype, device)
        self.max_context = min(config.max_context or checkpoint.max_context, checkpoint.max_context)
        self._checkpoint = checkpoint
        self.kernels = model.kernels.rows()
        """Which implementation of each operation the model runs."""
        self._sees = isinstance(model, VisionModel)
        self._clock = clock
        blocks = BlockPool(cache_memory.num_blocks(config), config.block_size)
        slots = StatePool(running)
        local = RankExecutor(model, self.caches, config.block_size, device, comm, checkpoint=checkpoint, dtype=dtype,
                             draft_tokens=draft_tokens)
        executor = local if log is None else LeadingExecutor(local, log)
        self._memory = Memory(blocks, slots, PrefixCache(blocks, StatePool(snapshots, first=slots.total),
                                                         enabled=config.prefix_cache),
                              executor, growth_tokens=config.growth_tokens, draft_tokens=draft_tokens)
        self._scheduler = Scheduler(self._memory, max_running=config.max_running, max_batch_tokens=config.max_batch_tokens,
                                    chunk_tokens=config.prefill_chunk_tokens, parked_fraction=parked_fraction)
        self._max_running = config.max_running
        self._runner = Runner(model, executor, config.block_size, device)
        self._runs: deque[Run] = deque()  # begun, in order
        self._prompts: dict[RequestId, Prompt] = {}
        self._counters = EngineCounters()

    # Prefill, and both halves in one ----------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, pixels: Sequence[Pixels] = (), publisher: Publisher | None = None,
               matcher: Matcher | None = None) -> None:
        """Queue a prompt. `pixels`: uint8 [H, W, 3] per grid. `matcher`: of the request's grammar, after its output so far.

        With a publisher only the prompt and the first token of each choice are computed here: the sequence is then HANDED_OFF,
        even if those tokens finish it, and its memory stays until `release`. Without one it decodes here to its end.
        Raises InvalidRequestError (also for an id that is in use) and ContextLengthError, for what could never run.
        """
        sequence = self._sequence(request, split=publisher is not None)
        prompt = prepare(request, pixels, publisher, self._checkpoint, self._sees)
        prompt.scores = None if request.prompt_logprobs is None else []
        sequence.matcher = matcher
        self._scheduler.add(sequence)
        self._prompts[request.id] = prompt

    def mark_ready(self, id: RequestId) -> None:
        """The destination is ready to take the prompt's bytes. Nothing happens if the request has ended."""
        for sequence in self._scheduler.of(id):
            sequence.ready = True

    def mark_parked(self, id: RequestId) -> None:
        """The destination was busy or is lost. Nothing happens if the request has ended."""
        for sequence in self._scheduler.of(id):
            sequence.ready = False

    def release(self, id: RequestId) -> None:
        """The transfer is over, one way or the other: the prompt's memory returns. Nothing happens if the request has ended.

        Raises InternalError before the hand-off: a request is given up by `abort` then.
        """
        for sequence in self._scheduler.of(id):
            if sequence.state is not State.HANDED_OFF:
                raise InternalError(f"{id} is {sequence.state.value}, not handed off; abort it instead")
        self.abort(id)

    def mrope(self, id: RequestId) -> MropeState:
        """Position state of a prompt, for the Handoff. Raises InternalError for an unknown id."""
        prompt = self._prompts.get(id)
        if prompt is None:
            raise InternalError(f"{id} has no prompt here")
        return prompt.mrope

    def cached_tokens(self, id: RequestId) -> int:
        """Tokens of a prompt that did not have to be computed. Raises InternalError for an unknown id."""
        return self._known(id).cached

    # Decode ------------------------------------------------------------------------------------------------------------

    def demand(self, request: GenerationRequest) -> int:
        """Blocks that `reserve` takes if nothing of the prompt is cached. Raises as `reserve` does."""
        return self._memory.demand(self._sequence(request, split=False))

    @property
    def slots_of_choice(self) -> int:
        """State slots that a choice takes, in a model that has any."""
        return 1 + self._memory.draft_tokens

    def reserve(self, request: GenerationRequest) -> Reservation | None:
        """Take memory for a prompt that is computed elsewhere and for the beginning of its output; None if there is none now.

        Raises InvalidRequestError and ContextLengthError for what could never run.
        """
        sequence = self._sequence(request, split=False)
        if not self._scheduler.reserve(sequence):
            return None
        self._count(landed_tokens=sequence.prompt_tokens, reused_tokens=sequence.cached)
        used = self._memory.blocks.blocks_for(sequence.prompt_tokens)
        return Reservation(blocks=sequence.blocks[:used], state_slot=sequence.state_slot, have_tokens=sequence.cached)

    def commit(self, id: RequestId, *, first_tokens: Sequence[int], mrope: MropeState,
               matcher: Matcher | None = None) -> None:
        """The reserved prompt's bytes are in: decode from the first token of each choice on, which are not reported again.

        A choice that its first token ends is not decoded. Raises InternalError for an id that is not reserved, or if all
        choices have ended (abort it then).
        """
        sequence = self._known(id)
        if len(first_tokens) != len(sequence.choices):
            raise InvalidRequestError(f"{len(first_tokens)} first tokens for {len(sequence.choices)} choices", field="n")
        self._check_tokens(first_tokens, "first token")
        if sequence.state is not State.RESERVED:
            raise InternalError(f"{id} is {sequence.state.value}, not reserved")
        sequence.matcher = matcher
        if all(sequence.finish_with(token) is not None for token in first_tokens):
            raise InternalError(f"the first tokens of {id} ended it: there is nothing to decode")
        self._scheduler.commit(sequence, first_tokens, self._clock())
        self._prompts[id] = Prompt(mrope=mrope)

    # Caches that travel -------------------------------------------------------------------------------------------------

    def lend(self, request: GenerationRequest) -> Reservation | None:
        """Hold what is cached here of a prompt, for a transfer to the cache of another replica, until `abort`: the first
        `have_tokens`, and a copy of the states after them. None: nothing is, or others may need the memory that it takes."""
        sequence = lent(request, self._checkpoint, self._memory.blocks.block_size)
        self._check_unused(request.id)
        if not self._scheduler.lend(sequence):
            return None
        return Reservation(blocks=sequence.blocks, state_slot=sequence.state_slot, have_tokens=sequence.cached)

    def borrow(self, request: GenerationRequest, num_tokens: int) -> Reservation | None:
        """Take memory for the first `num_tokens` of a prompt, which another replica has cached; None if there is none now.
        Raises ProtocolError if these are no whole blocks of the prompt."""
        sequence = borrowed(request, num_tokens, self._checkpoint, self._memory.blocks.block_size)
        self._check_unused(request.id)
        if not self._memory.cache.enabled or not self._scheduler.reserve(sequence):
            return None
        return Reservation(blocks=sequence.blocks, state_slot=sequence.state_slot, have_tokens=sequence.cached)

    def keep(self, id: RequestId) -> int:
        """The bytes that were borrowed are in: they go to the prefix cache. How many tokens of the prompt can be found there
        now, and could not before. Raises InternalError for an id that has no reservation."""
        sequence = self._known(id)
        if sequence.state is not State.RESERVED:
            raise InternalError(f"{id} is {sequence.state.value}, not reserved")
        gained = self._memory.keep_all(sequence)
        self._scheduler.end(sequence)
        return gained

    # Both --------------------------------------------------------------------------------------------------------------

    def abort(self, id: RequestId) -> bool:
        """End a request in any state; everything it owns returns. False if it has ended before.

        The caller has made sure that no transfer writes into its blocks any more.
        """
        known = bool(self._scheduler.of(id))
        self._scheduler.end_request(id)
        self._prompts.pop(id, None)
        return known

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Compute the next step. A fault fails the requests that it concerns; this method raises only for broken invariants.

        A request that was preempted is among the failures, with PreemptedError.
        """
        began = self._clock()
        plan = self._scheduler.plan(began)
        failures: dict[RequestId, SlipstreamError] = {id: PreemptedError(_PREEMPTED) for id in plan.preempted}
        for sequence in plan.begun:
            cached = self._memory.cached_tokens(sequence) if sequence not in plan.admitted else sequence.cached
            self._tell(sequence, failures, methodcaller("begin", cached))
        for sequence in plan.admitted:
            self._count(prompt_tokens=sequence.prompt_tokens, cached_tokens=sequence.cached)
            self._tell(sequence, failures, partial(_allocated, sequence))
        chunks = [chunk for chunk in plan.chunks if chunk.sequence.id not in failures]
        for chunk in plan.chunks:
            if chunk.sequence.id in failures:
                self._scheduler.discard(chunk)
        if chunks:
            self._runs.append(self._runner.start(chunks, self._prompts))
        result = RunResult()
        if self._runs and (len(self._runs) >= self._runner.depth or not chunks):
            result = self._runs.popleft().finish()
        failures |= {id: error for id, error in result.failed.items() if id in self._prompts}
        events, timings = self._advance(result, failures)
        for id in failures:
            self.abort(id)
        seconds = self._clock() - began
        self._count(steps=bool(result.chunks), step_seconds=seconds,
                    step_tokens=sum(chunk.count for chunk in result.chunks), output_tokens=len(events),
                    preemptions=len(plan.preempted))
        handed_off = frozenset(chunk.sequence.id for chunk, _, _ in result.done if chunk.sequence.state is State.HANDED_OFF)
        return StepResult(events=tuple(events), failures=tuple(failures.items()), timings=timings, handed_off=handed_off,
                          tokens=sum(chunk.count for chunk in chunks or result.chunks), seconds=seconds)

    def _advance(self, result: RunResult, failures: Mapping[RequestId, SlipstreamError]
                 ) -> tuple[list[TokenEvent], dict[RequestId, Timing]]:
        """What was computed counts; nothing of a request counts that failed in this step."""
        now = self._clock()
        events: list[TokenEvent] = []
        timings: dict[RequestId, Timing] = {}
        for chunk in result.chunks:
            if chunk.sequence.id in result.failed:
                self._scheduler.discard(chunk)
        for chunk, tokens, drafts in result.done:
            sequence = chunk.sequence
            if sequence.id in failures:
                self._scheduler.discard(chunk)
                continue
            if sequence.doomed:
                self._scheduler.advance(chunk, tokens, now)
                continue
            prompt = self._prompts[sequence.id]
            prompt.add_scores(result.scores.get(sequence.id))
            drawn = self._scheduler.advance(chunk, tokens, now, drafts)
            for event in drawn:
                told, scores = result.logprobs.get((event.request, event.choice, event.index)), prompt.take_scores()
                events.append(replace(event, logprobs=told, prompt=scores) if told or scores is not None else event)
            if chunk.drafts:
                self._count(spec_draft_tokens=len(chunk.drafts), spec_accepted_tokens=min(len(drawn), len(tokens) - 1))
            if tokens:
                left = self._scheduler.of(sequence.id)
                if not left or sequence.state is State.HANDED_OFF:
                    timings[sequence.id] = sequence.timing()
                if not left:
                    del self._prompts[sequence.id]
                elif chunk.start < sequence.prompt_tokens:
                    self._prompts[sequence.id].drop_inputs()
        return events, timings

    @property
    def has_work(self) -> bool:
        """True if a request waits for steps; `StepResult.stalled` says that none of them can run now."""
        return bool(self._runs) or self._scheduler.has_work

    def load(self) -> EngineLoad:
        """Requests and free memory now. Parked: computing or handed off without a ready destination."""
        scheduler, memory = self._scheduler, self._memory
        return EngineLoad(
            waiting=scheduler.count(State.WAITING), running=scheduler.count(State.COMPUTING, State.DECODING),
            waiting_tokens=scheduler.waiting_tokens,
            parked=sum(sequence.parked for sequence in scheduler.sequences()), cached_blocks=len(memory.cache),
            free_blocks=memory.cache.available, total_blocks=memory.blocks.total,
            free_state_slots=memory.slots.free, total_state_slots=memory.slots.total)

    def counters(self) -> EngineCounters:
        """What was done so far."""
        return replace(self._counters, evicted_blocks=self._memory.cache.evicted)

    def cache_changes(self) -> CacheChanges | None:
        """What became of the prefix cache since this was asked last; None: nothing."""
        return self._memory.cache.changes()

    def holdings(self) -> dict[Owner | None, tuple[int, int]]:
        """(blocks, state slots) of every owner; None: free. Snapshots are not counted, as they are no sequence's slots."""
        found: dict[Owner | None, tuple[int, int]] = {}
        memory = self._memory
        for number, owned in enumerate((memory.blocks.owned(), memory.slots.owned())):
            for owner in owned.values():
                blocks, slots = found.get(owner, (0, 0))
                found[owner] = (blocks + (number == 0), slots + (number == 1))
        return {None: (memory.blocks.free, memory.slots.free), **found}

    def check_integrity(self) -> None:
        """Raise InternalError unless every block and slot has exactly one owner and nothing is kept of ended requests."""
        self._scheduler.check_integrity()
        with_prompt = {sequence.id for sequence in self._scheduler.sequences()
                       if sequence.state not in (State.RESERVED, State.LENT) and not sequence.doomed}
        if self._prompts.keys() != with_prompt:
            raise InternalError(f"prompts are kept for the wrong requests: {self._prompts.keys() ^ with_prompt}")

    # -------------------------------------------------------------------------------------------------------------------

    def _sequence(self, request: GenerationRequest, *, split: bool) -> EngineSequence:
        """A new sequence for a request that could run."""
        self._check_unused(request.id)
        if not request.tokens:
            raise InvalidRequestError("the prompt is empty; send at least one token", field="prompt")
        self._check_tokens(request.tokens + request.output, "prompt token")
        check_params(request, self._checkpoint.vocab_size, self._max_running)
        prompt = len(request.tokens)
        if prompt >= self.max_context:
            raise ContextLengthError(f"the prompt has {prompt} tokens and the context window {self.max_context}: no room is "
                                     "left for output; shorten the prompt", field="prompt")
        sequence = EngineSequence(request=request, split=split, submitted_at=self._clock(),
                                  max_outputs=min(request.stop.max_tokens, self.max_context - prompt))
        if len(request.output) >= sequence.max_outputs:
            raise InvalidRequestError(f"{len(request.output)} tokens of output are there already and {sequence.max_outputs} is "
                                      "the limit: there is nothing to resume", field="output")
        blocks = self._memory.blocks
        if self._memory.worst(sequence) > blocks.total:
            raise ContextLengthError(f"{prompt} prompt tokens with room for {sequence.rows - prompt} more need "
                                     f"{self._memory.worst(sequence)} blocks; this replica has {blocks.total}: lower "
                                     "max_tokens or n, or raise engine.kv_cache_tokens", field="max_tokens")
        if self._memory.cache.enabled:
            sequence.keys = block_keys(request, self._checkpoint, blocks.block_size)
        return sequence

    def _check_unused(self, id: RequestId) -> None:
        if self._scheduler.of(id):
            raise InvalidRequestError(f"request id {id} is in use; every request needs its own", field="request_id")

    def _count(self, **more: float) -> None:
        grown = {name: getattr(self._counters, name) + value for name, value in more.items()}
        self._counters = replace(self._counters, **grown)

    def _check_tokens(self, tokens: Sequence[int], what: str) -> None:
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self._checkpoint.vocab_size:
            raise InvalidRequestError(f"{what} {low if low < 0 else high} is not in the vocabulary of "
                                      f"{self._checkpoint.vocab_size} tokens", field="prompt")

    def _known(self, id: RequestId) -> EngineSequence:
        sequences = self._scheduler.of(id)
        if not sequences:
            raise InternalError(f"{id} is not known here: it never came, or it has ended")
        return sequences[0]

    def _tell(self, sequence: EngineSequence, failures: dict[RequestId, SlipstreamError],
              message: Callable[[Publisher], None]) -> None:
        publisher = self._prompts[sequence.id].publisher
        if publisher is None or sequence.id in failures:
            return
        try:
            message(publisher)
        except Exception as error:
            failures[sequence.id] = as_failure("announcing the prompt failed", sequence.id, error)


def _allocated(sequence: EngineSequence, publisher: Publisher) -> None:
    publisher.allocated(sequence.blocks, sequence.state_slot, sequence.cached)
