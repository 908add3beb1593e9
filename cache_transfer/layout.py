"""What a model keeps per sequence, as named tensors with exact sizes, and whether two ranks agree on it. Knows no memory.

A `kv` tensor is counted in token rows (a row is one token's keys and values), a state tensor in bytes. Each is runs of heads,
so that the part of a rank, or of a stream between two ranks, is a tensor of the same kind with fewer bytes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Protocol

import xxhash

from slipstream.sharding import Geometry, Shard
from slipstream.types import AttentionLayer, DraftLayer, KvScales, LayerSpec

PROTOCOL_VERSION = "3"
MEMORY_ORDER = "kv[block,head,k|v,token,channel] conv[slot,q|k|v,column] recurrent[slot,value_head,key,value]"

Cut = tuple[tuple[int, int], ...]
"""(offset, bytes) of what is seen of one token's keys, the same again of its values, or of a state's slot."""

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class Kind(enum.Enum):
    """What a tensor holds."""

    KV = "kv"
    CONV = "conv"
    RECURRENT = "recurrent"
    HIDDEN = "hidden"
    """The model's output for the last token, whole on every tensor rank: one head."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One named tensor of one layer."""

    name: str
    """Such as `layers.3.kv`."""
    layer: int
    """Index in the checkpoint's layer list."""
    kind: Kind
    runs: tuple[tuple[int, int], ...]
    """(heads, bytes of each), as they lie in one token's keys (its values lie alike), or in a state's slot."""

    @cached_property
    def unit_bytes(self) -> int:
        """kv: bytes of one token row, keys and values together; a state: bytes of the whole slot."""
        return sum(heads * size for heads, size in self.runs) * (2 if self.kind is Kind.KV else 1)

    def units(self, num_tokens: int) -> int:
        """How much of it a prompt of `num_tokens` needs: rows, or bytes of state."""
        return num_tokens if self.kind is Kind.KV else self.unit_bytes


@dataclass(frozen=True, slots=True)
class Range:
    """Units [first, first + units) of a stream's tensor: token rows of a kv tensor, bytes of a state."""

    tensor: int
    first: int
    units: int


class Part(Protocol):
    """Named tensors of one layout: all of them, those of a rank, or what a stream carries of them."""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """In layer order; a tensor's number on a stream is its index here."""

    @property
    def block_size(self) -> int:
        """Token rows of a block."""


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Everything that both sides of a transfer must have in common."""

    model_name: str
    weights_revision: str
    """A fingerprint of the checkpoint's files."""
    layers: tuple[LayerSpec, ...]
    block_size: int
    kv_dtype: str
    """torch's name, which also tells the flavours of FP8 apart: e4m3fn and e4m3fnuz are other numbers by the same bits."""
    conv_dtype: str
    """The model's own."""
    recurrent_dtype: str = "float32"
    kv_scales: KvScales = ()
    protocol: str = PROTOCOL_VERSION
    memory_order: str = MEMORY_ORDER

    def fields(self) -> dict[str, str]:
        """Field by field, for a Hello that can name what differs."""
        named = {field.name: str(getattr(self, field.name)) for field in fields(self)
                 if field.name not in ("layers", "kv_scales")}
        named |= {f"layer {number}": repr(layer) for number, layer in enumerate(self.layers)}
        named |= {f"layer {number} kv_scales": f"k {k!r} v {v!r}" for number, (k, v) in enumerate(self.kv_scales)}
        return named

    @cached_property
    def hash(self) -> str:
        """Equal exactly where `fields` are equal; stable across processes and machines."""
        text = "\n".join(f"{name}={value}" for name, value in sorted(self.fields().items()))
        return xxhash.xxh3_128_hexdigest(text.encode())

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """In layer order, whole."""
        return self.held(whole(self))

    def held(self, shard: Shard) -> tuple[TensorSpec, ...]:
        """The tensors of one rank, in layer order."""
        found: list[TensorSpec] = []
        for number, layer in zip(shard.layers, shard.specs(self.layers), strict=True):
            if isinstance(layer, AttentionLayer):
                found.append(TensorSpec(name=f"{layer.name}.kv", layer=number, kind=Kind.KV,
                                        runs=((layer.kv_heads, layer.head_size * _ITEM_BYTES[self.kv_dtype]),)))
                if isinstance(layer, DraftLayer):
                    found.append(TensorSpec(name=f"{layer.name}.hidden", layer=number, kind=Kind.HIDDEN,
                                            runs=((1, layer.hidden_size * _ITEM_BYTES[self.conv_dtype]),)))
                continue
            column = (layer.conv_width - 1) * _ITEM_BYTES[self.conv_dtype]
            keys, values = (layer.key_heads, layer.key_head_size * column), (layer.value_heads, layer.value_head_size * column)
            state = layer.key_head_size * layer.value_head_size * _ITEM_BYTES[self.recurrent_dtype]
            found.append(TensorSpec(name=f"{layer.name}.conv", layer=number, kind=Kind.CONV, runs=(keys, keys, values)))
            found.append(TensorSpec(name=f"{layer.name}.recurrent", layer=number, kind=Kind.RECURRENT,
                                    runs=((layer.value_heads, state),)))
        return tuple(found)

    def bytes_necessary(self, num_tokens: int) -> tuple[int, int]:
        """(KV bytes, state bytes) of so many tokens to send to a single rank: slope * tokens, and a constant."""
        rows = sum(tensor.unit_bytes for tensor in self.tensors if tensor.kind is Kind.KV)
        return rows * num_tokens, sum(tensor.unit_bytes for tensor in self.tensors) - rows


def whole(layout: CacheLayout) -> Shard:
    """The single rank of a replica that is not cut."""
    return Shard(geometry=Geometry(stages=(len(layout.layers),)))


def differences(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """`name: ours A, theirs B` for every field that differs; empty if none does."""
    names = sorted(ours.keys() | theirs.keys())
    return "; ".join(f"{name}: ours {ours.get(name, 'absent')}, theirs {theirs.get(name, 'absent')}"
                     for name in names if ours.get(name) != theirs.get(name))
