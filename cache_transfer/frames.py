"""The frames of a Transfer stream: one kind byte, then a Control message or a table of ranges and their bytes.

Data frame, little endian: u8 kind | u8 flags | u64 checksum | u32 count | count x (u32 tensor, u64 first, u64 units) | payload.
With flag 1 the checksum is XXH3-64 over the ranges' bytes. The payload is the channel's: on grpc the bytes themselves,
elsewhere what the destination needs to find them. They are the ranges one after the other; a kv range goes block by block, in
each head by head, keys then values.
Knows no memory: it finds where a payload lies, and never copies it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from cache_transfer.handoff import VERSION, Handoff, HandoffChoice
from cache_transfer.layout import Range
from slipstream.errors import ProtocolError
from slipstream.sharding import Geometry
from slipstream.types import MropeState
from slipstream.v1 import cache_store_pb2 as pb

M = TypeVar("M", bound=Message)

SERVICE: str = pb.DESCRIPTOR.services_by_name["CacheStore"].full_name

_CONTROL, _DATA = 0, 1
_HEAD = struct.Struct("<BBQI")
_RANGE = struct.Struct("<IQQ")
MAX_RANGES = 1 << 16


@dataclass(frozen=True, slots=True)
class Data:
    """A data frame."""

    ranges: list[Range]
    payload: memoryview
    checksum: int | None
    """Of the bytes that the ranges name, if the source made one."""


def control(**message: object) -> bytes:
    """A Control frame: `control(begin=pb.Begin(...))`."""
    return bytes((_CONTROL,)) + pb.Control(**message).SerializeToString()  # type: ignore[arg-type]


def data_header(ranges: Sequence[Range], checksum: int | None) -> bytes:
    """What stands before the payload."""
    table = b"".join(_RANGE.pack(part.tensor, part.first, part.units) for part in ranges)
    return _HEAD.pack(_DATA, checksum is not None, checksum or 0, len(ranges)) + table


def is_data(frame: bytes) -> bool:
    """True for a data frame, false for a Control message."""
    return frame[:1] == bytes((_DATA,))


def decode(kind: type[M], data: bytes) -> M:
    """A message of this kind. Raises ProtocolError."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"{len(data)} bytes that are no {kind.DESCRIPTOR.name} message: {error}") from error


def parse(frame: bytes) -> pb.Control | Data:
    """Raises ProtocolError."""
    if not frame:
        raise ProtocolError("an empty frame on a Transfer stream")
    if frame[0] == _CONTROL:
        return decode(pb.Control, frame[1:])
    if frame[0] != _DATA:
        raise ProtocolError(f"a frame of unknown kind {frame[0]}")
    try:
        _, flags, checksum, count = _HEAD.unpack_from(frame)
        if flags > 1:
            raise ProtocolError(f"a data frame with unknown flags {flags}")
        if count > MAX_RANGES:
            raise ProtocolError(f"a data frame of {count} ranges; the limit is {MAX_RANGES}")
        ranges = [Range(*_RANGE.unpack_from(frame, _HEAD.size + i * _RANGE.size)) for i in range(count)]
    except struct.error as error:
        raise ProtocolError(f"a data frame of {len(frame)} bytes is too short for its table") from error
    return Data(ranges, memoryview(frame)[_HEAD.size + count * _RANGE.size :], checksum if flags else None)


def handoff_to_pb(handoff: Handoff) -> pb.Handoff:
    """For the wire."""
    return pb.Handoff(
        version=VERSION, request_id=handoff.request_id, prompt_tokens=handoff.prompt_tokens,
        state_token_count=handoff.state_token_count, cached_tokens=handoff.cached_tokens,
        choices=[pb.Choice(first_token=choice.first_token, choice=choice.choice, finished=choice.finished)
                 for choice in handoff.choices],
        mrope_delta=handoff.mrope.delta, mrope_last_position=handoff.mrope.last_position)


def handoff_from_pb(message: pb.Handoff) -> Handoff:
    """From the wire. Raises ProtocolError for another version or a malformed record."""
    if message.version != VERSION:
        raise ProtocolError(f"a Handoff of version {message.version}; this side speaks {VERSION}")
    if len(message.mrope_last_position) != 3 or not message.choices:
        raise ProtocolError("a Handoff without three position axes and at least one choice")
    if len({choice.choice for choice in message.choices}) < len(message.choices):
        raise ProtocolError("a Handoff names a choice twice")
    t, h, w = message.mrope_last_position
    return Handoff(
        request_id=message.request_id, prompt_tokens=message.prompt_tokens, state_token_count=message.state_token_count,
        cached_tokens=message.cached_tokens,
        choices=tuple(HandoffChoice(first_token=choice.first_token, choice=choice.choice, finished=choice.finished)
                      for choice in message.choices),
        mrope=MropeState(delta=message.mrope_delta, last_position=(t, h, w)))


def geometry_to_pb(geometry: Geometry) -> pb.Geometry:
    """For the wire."""
    return pb.Geometry(tp=geometry.tp, stages=geometry.stages)


def geometry_from_pb(message: pb.HelloRequest | pb.HelloReply | pb.Open, num_layers: int) -> Geometry:
    """Of the side that sent the message; it may fit no model."""
    if not message.HasField("geometry"):
        return Geometry(stages=(num_layers,))
    return Geometry(tp=message.geometry.tp, stages=tuple(message.geometry.stages))
