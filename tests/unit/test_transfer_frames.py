"""Frames: what is packed is what is parsed, and nothing that a peer sends gets past a typed error."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_transfer import frames
from cache_transfer.handoff import Handoff, HandoffChoice
from cache_transfer.layout import Range
from slipstream.errors import ProtocolError
from slipstream.types import MropeState
from slipstream.v1 import cache_store_pb2 as pb

HANDOFF = Handoff(request_id="r", prompt_tokens=17, state_token_count=17, cached_tokens=4,
                  choices=(HandoffChoice(first_token=7), HandoffChoice(first_token=0, choice=1, finished=True)),
                  mrope=MropeState(delta=-18, last_position=(3, 0, 5)))

RANGES = st.lists(st.builds(Range, st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), max_size=5)


@given(RANGES, st.binary(max_size=50))
def test_a_data_frame_survives(ranges: list[Range], payload: bytes) -> None:
    for checksum in (None, 0, 2**64 - 1):
        parsed = frames.parse(frames.data_header(ranges, checksum) + payload)
        assert isinstance(parsed, frames.Data)
        assert (parsed.ranges, bytes(parsed.payload), parsed.checksum) == (ranges, payload, checksum)


def test_offsets_are_64_bit() -> None:
    far = Range(1, 70_000 * 65_536, 1 << 40)
    parsed = frames.parse(frames.data_header([far], None))
    assert isinstance(parsed, frames.Data)
    assert parsed.ranges == [far]


@given(st.binary(max_size=60))
def test_rubbish_is_a_protocol_error_or_a_frame(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        frames.parse(data)


@pytest.mark.parametrize("cut", [1, 4, 5, 24])
def test_a_cut_table_is_a_protocol_error(cut: int) -> None:
    with pytest.raises(ProtocolError, match="too short"):
        frames.parse(frames.data_header([Range(0, 0, 1)], 1)[:cut])


def test_a_table_that_could_only_be_an_attack_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError, match="ranges"):
        frames.parse(b"\x01" + bytes(9) + (frames.MAX_RANGES + 1).to_bytes(4, "little"))


def test_a_handoff_survives() -> None:
    frame = frames.parse(frames.control(handoff=frames.handoff_to_pb(HANDOFF)))
    assert isinstance(frame, pb.Control)
    assert frames.handoff_from_pb(frame.handoff) == HANDOFF
    assert not HANDOFF.finished  # one choice goes on


@pytest.mark.parametrize(("change", "text"), [
    ({"version": 2}, "version 2"), ({"mrope_last_position": [1, 2]}, "three position axes"),
    ({"choices": []}, "at least one choice")])
def test_a_handoff_of_another_kind_is_refused(change: dict[str, object], text: str) -> None:
    message = frames.handoff_to_pb(HANDOFF)
    for name, value in change.items():
        message.ClearField(name)  # type: ignore[arg-type]
        message.MergeFrom(pb.Handoff(**{name: value}))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=text):
        frames.handoff_from_pb(message)
