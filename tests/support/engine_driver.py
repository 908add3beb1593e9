"""Drives an engine by hand in tests: requests, running to the end, moving a prompt's state from one engine to another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.engine.caches import states_of
from slipstream.engine.engine import Engine, GenerationRequest, Reservation, StepResult
from slipstream.errors import SlipstreamError
from slipstream.layers.batch import AttentionCache
from slipstream.types import FinishReason, Grid, RequestId, SamplingParams, StopParams


class Recorder:
    """A Publisher that writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def begin(self, cached_tokens: int) -> None:
        """See engine.Publisher."""
        self.calls.append(("begin", cached_tokens))

    def allocated(self, blocks: tuple[int, ...], state_slot: int | None, cached_tokens: int) -> None:
        """See engine.Publisher."""
        self.calls.append(("allocated", blocks, state_slot, cached_tokens))

    def layer_done(self, layer: int, num_tokens: int, last_chunk: bool) -> None:
        """See engine.Publisher."""
        self.calls.append(("layer", layer, num_tokens, last_chunk))

    @property
    def place(self) -> tuple[tuple[int, ...], int | None]:
        """Blocks and slot that were allocated."""
        for call in self.calls:
            if call[0] == "allocated":
                return call[1], call[2]  # type: ignore[return-value]
        raise AssertionError("nothing was allocated")


def request(name: str, tokens: Sequence[int], max_tokens: int = 8, *, grids: Sequence[Grid] = (), temperature: float = 0.0,
            top_p: float = 1.0, seed: int = 0, stop: Sequence[int] = (), ignore_eos: bool = False,
            images: Sequence[bytes] = (), choices: tuple[int, ...] = (0,), output: Sequence[int] = (), salt: str = ""
            ) -> GenerationRequest:
    """A request with the usual values."""
    return GenerationRequest(
        id=RequestId(name=name), tokens=tuple(tokens), grids=tuple(grids), images=tuple(images), choices=choices,
        output=tuple(output), cache_salt=salt,
        sampling=SamplingParams(temperature=temperature, top_p=top_p, seed=seed),
        stop=StopParams(max_tokens=max_tokens, stop_token_ids=frozenset(stop), ignore_eos=ignore_eos))


class Collector:
    """Gathers what steps report, and checks that indices are dense and nothing follows a finish."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, FinishReason] = {}
        self.failures: dict[str, SlipstreamError] = {}

    def add(self, result: StepResult, first_index: int = 0) -> None:
        """Take a step's events in."""
        for event in result.events:
            name = event.request.name
            tokens = self.tokens.setdefault(name, [])
            assert name not in self.finish, f"a token of {name} after its finish"
            assert event.index == len(tokens) + first_index, f"a gap or a repetition in {name}"
            tokens.append(event.token)
            if event.finish is not None:
                self.finish[name] = event.finish
        self.failures.update({id.name: error for id, error in result.failures})


def run(engine: Engine, collector: Collector | None = None, first_index: int = 0) -> Collector:
    """Step until nothing is left that can run."""
    collector = collector or Collector()
    while engine.has_work:
        result = engine.step()
        engine.check_integrity()
        collector.add(result, first_index)
        if result.stalled:
            break
    return collector


def copy_state(source: Engine, blocks: Sequence[int], slot: int | None, target: Engine, landing: Reservation,
               rows: int) -> None:
    """Copy KV rows [landing.have_tokens, rows) and the recurrent states of a prompt, as a transfer would. Block sizes may not
    differ."""
    for ours, theirs in zip(source.caches, target.caches, strict=True):
        if isinstance(ours, AttentionCache):
            assert isinstance(theirs, AttentionCache)
            size = ours.kv.shape[3]
            for row in range(landing.have_tokens, rows):
                there = landing.blocks[row // size]
                theirs.kv[there, :, :, row % size] = ours.kv[blocks[row // size], :, :, row % size]
        for name, state in states_of(ours).items():
            assert slot is not None
            assert landing.state_slot is not None
            states_of(theirs)[name][landing.state_slot] = state[slot]


def poison(engine: Engine) -> None:
    """Fill all caches with NaN: whatever is read before it is written shows."""
    for cache in engine.caches:
        for tensor in ([cache.kv] if isinstance(cache, AttentionCache) else []) + list(states_of(cache).values()):
            tensor.view(torch.uint8).fill_(127) if tensor.dtype == torch.float8_e4m3fn else tensor.fill_(torch.nan)


def assert_empty(engine: Engine) -> None:
    """Nothing is owned and nothing is remembered."""
    engine.check_integrity()
    load = engine.load()
    assert (load.free_blocks, load.free_state_slots) == (load.total_blocks, load.total_state_slots)
    assert (load.waiting, load.running, load.parked) == (0, 0, 0)


def split(prefill: Engine, decode: Engine, requests: Sequence[tuple[GenerationRequest, Sequence[object]]]) -> Collector:
    """Compute prompts on one engine, move them by hand, decode on the other: everything that both report, joined.

    The decode side holds something else first, so that a prompt lies in different blocks and slots on the two sides.
    """
    blocker = request("blocker", [1] * 9)
    assert decode.reserve(blocker) is not None
    recorders = {}
    for req, pixels in requests:
        recorders[req.id] = Recorder()
        prefill.submit(req, pixels, recorders[req.id])  # type: ignore[arg-type]
    first = run(prefill)
    for req, _ in requests:
        name = req.id.name
        if name not in first.finish:
            landing = decode.reserve(req)
            assert landing is not None
            assert (landing.blocks, landing.state_slot) != recorders[req.id].place
            copy_state(prefill, *recorders[req.id].place, decode, landing, len(req.tokens))
            decode.commit(req.id, first_tokens=first.tokens[name], mrope=prefill.mrope(req.id))
        prefill.release(req.id)
    rest = run(decode, first_index=1)
    decode.abort(blocker.id)
    assert_empty(prefill)
    assert_empty(decode)
    for name, tokens in rest.tokens.items():
        first.tokens[name] += tokens
    first.finish.update(rest.finish)
    return first
