"""One rank's engine: requests in, tokens out, one step at a time. Knows no network and no role; not thread-safe.

Ledger: a block or slot belongs to the free list, a sequence (computing, decoding), a reservation (its bytes are arriving) or a
transfer (its bytes are leaving). It goes back with the sequence's last token, `release` (transfers), `abort`, or a failed step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from slipstream.checkpoint import Checkpoint
from slipstream.config import EngineConfig
from slipstream.engine import caches as cache_memory
from slipstream.engine.block_pool import BlockPool
from slipstream.engine.params import check_params
from slipstream.engine.prompt import Pixels, Prompt, Publisher, prepare
from slipstream.engine.runner import Runner, as_failure
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.sequence import GenerationRequest, State, Timing
from slipstream.engine.sequence import Sequence as EngineSequence
from slipstream.engine.state_pool import StatePool
from slipstream.errors import ConfigError, ContextLengthError, InternalError, InvalidRequestError, SlipstreamError
from slipstream.layers.batch import LayerCache
from slipstream.models.registry import LanguageModel, VisionModel
from slipstream.types import EngineLoad, MropeState, RequestId, TokenEvent

__all__ = ["Engine", "GenerationRequest", "Publisher", "Reservation", "StepResult", "Timing"]


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Memory that waits for a prompt's bytes."""

    blocks: tuple[int, ...]
    """Block table of the prompt's rows; the blocks of its growth are owned too, and not named here."""
    state_slot: int | None


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did."""

    events: tuple[TokenEvent, ...] = ()
    failures: tuple[tuple[RequestId, SlipstreamError], ...] = ()
    """Requests that ended by a fault; everything they owned has returned."""
    timings: dict[RequestId, Timing] = field(default_factory=dict)
    """Of every request that ended, or was handed off, in this step."""
    tokens: int = 0
    """That went through the model."""
    seconds: float = 0.0

    @property
    def stalled(self) -> bool:
        """True if nothing could run: another step is of no use until the engine is told something."""
        return self.tokens == 0 and not self.failures


class Engine:
    """Continuous batching over one model and its paged caches."""

    def __init__(self, model: LanguageModel, checkpoint: Checkpoint, config: EngineConfig, *, parked_fraction: float = 1.0,
                 dtype: torch.dtype = torch.float32, device: torch.device | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """`dtype`: of the KV and conv caches, the model's own. `parked_fraction`: share of the blocks, and of the slots, that
        prompts without a ready destination may hold. Raises ConfigError."""
        if config.max_running > config.max_batch_tokens:
            raise ConfigError(f"engine.max_running ({config.max_running}) must not exceed engine.max_batch_tokens "
                              f"({config.max_batch_tokens})", field="engine.max_running")
        device = device or torch.device("cpu")
        self.caches: tuple[LayerCache, ...] = cache_memory.allocate(checkpoint, config, dtype, device)
        self.max_context = min(config.max_context or checkpoint.max_context, checkpoint.max_context)
        self._checkpoint = checkpoint
        self._sees = isinstance(model, VisionModel)
        self._clock = clock
        self._scheduler = Scheduler(
            blocks=BlockPool(cache_memory.num_blocks(config), config.block_size),
            slots=StatePool(cache_memory.num_state_slots(checkpoint, config)),
            max_running=config.max_running, max_batch_tokens=config.max_batch_tokens,
            chunk_tokens=config.prefill_chunk_tokens, parked_fraction=parked_fraction)
        self._runner = Runner(model, self.caches, config.block_size, device)
        self._sequences: dict[RequestId, EngineSequence] = {}
        self._prompts: dict[RequestId, Prompt] = {}

    # Prefill, and both halves in one ----------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, pixels: Sequence[Pixels] = (), publisher: Publisher | None = None) -> None:
        """Queue a prompt. `pixels`: uint8 [H, W, 3] per grid.

        With a publisher only the prompt and its first token are computed here: the sequence is then HANDED_OFF, even if that
        token finishes it, and its memory stays until `release`. Without one it decodes here to its end.
        Raises InvalidRequestError (also for an id that is in use) and ContextLengthError, for what could never run.
        """
        sequence = self._sequence(request, split=publisher is not None)
        prompt = prepare(request, pixels, publisher, self._checkpoint, self._sees)
        self._scheduler.add(sequence)
        self._sequences[request.id] = sequence
        self._prompts[request.id] = prompt

    def mark_ready(self, id: RequestId) -> None:
        """The destination is ready to take the prompt's bytes. Nothing happens if the request has ended."""
        if sequence := self._sequences.get(id):
            sequence.ready = True

    def mark_parked(self, id: RequestId) -> None:
        """The destination was busy or is lost. Nothing happens if the request has ended."""
        if sequence := self._sequences.get(id):
            sequence.ready = False

    def release(self, id: RequestId) -> None:
        """The transfer is over, one way or the other: the prompt's memory returns. Nothing happens if the request has ended.

        Raises InternalError before the hand-off: a request is given up by `abort` then.
        """
        sequence = self._sequences.get(id)
        if sequence is None:
            return
        if sequence.state is not State.HANDED_OFF:
            raise InternalError(f"{id} is {sequence.state.value}, not handed off; abort it instead")
        self._end(sequence)

    def mrope(self, id: RequestId) -> MropeState:
        """Position state of a prompt, for the Handoff. Raises InternalError for an unknown id."""
        prompt = self._prompts.get(id)
        if prompt is None:
            raise InternalError(f"{id} has no prompt here")
        return prompt.mrope

    def prompt_timing(self, id: RequestId) -> Timing:
        """Seconds so far. Raises InternalError for an unknown id."""
        return self._known(id).timing()

    # Decode ------------------------------------------------------------------------------------------------------------

    def reserve(self, request: GenerationRequest) -> Reservation | None:
        """Take memory for a prompt that is computed elsewhere and for all its output; None if there is none now.

        Raises InvalidRequestError and ContextLengthError for what could never run.
        """
        sequence = self._sequence(request, split=False)
        if not self._scheduler.reserve(sequence):
            return None
        self._sequences[request.id] = sequence
        used = self._scheduler.blocks.blocks_for(sequence.prompt_tokens)
        return Reservation(blocks=sequence.blocks[:used], state_slot=sequence.state_slot)

    def commit(self, id: RequestId, *, first_tokens: Sequence[int], mrope: MropeState) -> None:
        """The reserved prompt's bytes are in: decode from its first token on, which is not reported again.

        Raises InternalError for an id that is not reserved, or a first token that already ended the request (abort it then).
        """
        sequence = self._known(id)
        if len(first_tokens) != 1:
            raise InvalidRequestError(f"{len(first_tokens)} first tokens: this engine decodes one choice", field="n")
        self._check_tokens(first_tokens, "first token")
        if sequence.state is State.RESERVED and sequence.finish_with(first_tokens[0]) is not None:
            raise InternalError(f"the first token of {id} ended it: there is nothing to decode")
        self._scheduler.commit(sequence, first_tokens[0], self._clock())
        self._prompts[id] = Prompt(mrope=mrope)

    # Both --------------------------------------------------------------------------------------------------------------

    def abort(self, id: RequestId) -> bool:
        """End a request in any state; everything it owns returns. False if it has ended before.

        The caller has made sure that no transfer writes into its blocks any more.
        """
        sequence = self._sequences.get(id)
        if sequence is None:
            return False
        self._end(sequence)
        return True

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Compute the next step. A fault fails the requests that it concerns; this method raises only for broken invariants."""
        began = self._clock()
        plan = self._scheduler.plan(began)
        failures: dict[RequestId, SlipstreamError] = {}
        for sequence in plan.begun:
            self._tell(sequence, failures, lambda publisher: publisher.begin())
        for sequence in plan.admitted:
            self._tell(sequence, failures, partial(_allocated, sequence))
        chunks = [chunk for chunk in plan.chunks if chunk.sequence.id not in failures]
        result = self._runner.run(chunks, self._prompts)
        now = self._clock()
        events: list[TokenEvent] = []
        timings: dict[RequestId, Timing] = {}
        for chunk, token in result.done:
            event = self._scheduler.advance(chunk, token, now)
            if event is None:
                continue
            events.append(replace(event, logprobs=told) if (told := result.logprobs.get(event.request)) else event)
            if chunk.sequence.state in (State.ENDED, State.HANDED_OFF):
                timings[event.request] = chunk.sequence.timing()
            self._settle(chunk.sequence)
        failures.update(result.failed)
        for id in failures:
            self._end(self._sequences[id])
        return StepResult(events=tuple(events), failures=tuple(failures.items()), timings=timings,
                          tokens=sum(chunk.count for chunk in chunks), seconds=now - began)

    @property
    def has_work(self) -> bool:
        """True if a request waits for steps; `StepResult.stalled` says that none of them can run now."""
        return self._scheduler.has_work

    def load(self) -> EngineLoad:
        """Requests and free memory now. Parked: computing or handed off without a ready destination."""
        scheduler = self._scheduler
        return EngineLoad(
            waiting=scheduler.count(State.WAITING), running=scheduler.count(State.COMPUTING, State.DECODING),
            parked=sum(sequence.parked for sequence in self._sequences.values()),
            free_blocks=scheduler.blocks.free, total_blocks=scheduler.blocks.total,
            free_state_slots=scheduler.slots.free, total_state_slots=scheduler.slots.total)

    def check_integrity(self) -> None:
        """Raise InternalError unless every block and slot has exactly one owner and nothing is kept of ended requests."""
        self._scheduler.check_integrity()
        scheduled = {sequence.id: sequence for sequence in self._scheduler.sequences()}
        if scheduled != self._sequences:
            raise InternalError(f"scheduler and engine disagree about requests: {scheduled.keys() ^ self._sequences.keys()}")
        with_prompt = {id for id, sequence in scheduled.items() if sequence.state is not State.RESERVED}
        if self._prompts.keys() != with_prompt:
            raise InternalError(f"prompts are kept for the wrong requests: {self._prompts.keys() ^ with_prompt}")

    # -------------------------------------------------------------------------------------------------------------------

    def _sequence(self, request: GenerationRequest, *, split: bool) -> EngineSequence:
        """A new sequence for a request that could run."""
        if request.id in self._sequences:
            raise InvalidRequestError(f"request id {request.id} is in use; every request needs its own", field="request_id")
        if not request.tokens:
            raise InvalidRequestError("the prompt is empty; send at least one token", field="prompt")
        self._check_tokens(request.tokens, "prompt token")
        check_params(request, self._checkpoint.vocab_size)
        prompt = len(request.tokens)
        if prompt >= self.max_context:
            raise ContextLengthError(f"the prompt has {prompt} tokens and the context window {self.max_context}: no room is "
                                     "left for output; shorten the prompt", field="prompt")
        sequence = EngineSequence(request=request, split=split, submitted_at=self._clock(),
                                  max_outputs=min(request.stop.max_tokens, self.max_context - prompt))
        blocks = self._scheduler.blocks
        if blocks.blocks_for(sequence.rows) > blocks.total:
            raise ContextLengthError(f"{prompt} prompt tokens with room for {sequence.rows - prompt} more need "
                                     f"{blocks.blocks_for(sequence.rows)} blocks; this replica has {blocks.total}: lower "
                                     "max_tokens or raise engine.kv_cache_tokens", field="max_tokens")
        return sequence

    def _check_tokens(self, tokens: Sequence[int], what: str) -> None:
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self._checkpoint.vocab_size:
            raise InvalidRequestError(f"{what} {low if low < 0 else high} is not in the vocabulary of "
                                      f"{self._checkpoint.vocab_size} tokens", field="prompt")

    def _known(self, id: RequestId) -> EngineSequence:
        sequence = self._sequences.get(id)
        if sequence is None:
            raise InternalError(f"{id} is not known here: it never came, or it has ended")
        return sequence

    def _tell(self, sequence: EngineSequence, failures: dict[RequestId, SlipstreamError],
              message: Callable[[Publisher], None]) -> None:
        publisher = self._prompts[sequence.id].publisher
        if publisher is None or sequence.id in failures:
            return
        try:
            message(publisher)
        except Exception as error:
            failures[sequence.id] = as_failure("announcing the prompt failed", sequence.id, error)

    def _settle(self, sequence: EngineSequence) -> None:
        """The sequence drew a token: forget it if that was its last, and its inputs if that was its first."""
        if sequence.state is State.ENDED:
            self._forget(sequence.id)
        elif len(sequence.outputs) == 1:
            self._prompts[sequence.id].drop_inputs()

    def _end(self, sequence: EngineSequence) -> None:
        self._scheduler.end(sequence)
        self._forget(sequence.id)

    def _forget(self, id: RequestId) -> None:
        del self._sequences[id]
        self._prompts.pop(id, None)


def _allocated(sequence: EngineSequence, publisher: Publisher) -> None:
    publisher.allocated(sequence.blocks, sequence.state_slot)
