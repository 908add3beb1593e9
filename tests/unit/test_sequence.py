"""A sequence's life: which state may follow which, and what it owns in each."""

from __future__ import annotations

import itertools

import pytest

from slipstream.engine.sequence import GenerationRequest, Sequence, State
from slipstream.errors import InternalError
from slipstream.types import RequestId, SamplingParams, StopParams

LEGAL = {
    ("waiting", "computing"), ("waiting", "reserved"), ("waiting", "ended"), ("computing", "handed_off"),
    ("computing", "decoding"), ("computing", "ended"), ("handed_off", "ended"), ("reserved", "decoding"),
    ("reserved", "ended"), ("decoding", "ended"), ("waiting", "lent"), ("lent", "ended"),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)))
def test_transitions(before: State, after: State) -> None:
    request = GenerationRequest(id=RequestId(name="a"), tokens=(1,), sampling=SamplingParams(), stop=StopParams(max_tokens=1))
    sequence = Sequence(request=request, split=False, max_outputs=1, state=before)
    if (before.value, after.value) in LEGAL:
        sequence.move(after)
        assert sequence.state is after
    else:
        with pytest.raises(InternalError, match=f"from {before.value} to {after.value}"):
            sequence.move(after)


@pytest.mark.parametrize("state", [State.WAITING, State.ENDED])
def test_a_sequence_that_owns_nothing_has_no_owner(state: State) -> None:
    request = GenerationRequest(id=RequestId(name="a"), tokens=(1,), sampling=SamplingParams(), stop=StopParams(max_tokens=1))
    with pytest.raises(InternalError, match="owns nothing"):
        _ = Sequence(request=request, split=False, max_outputs=1, state=state).owner
