"""What a rank keeps per sequence, as named tensors with exact sizes, and whether two ranks agree on it. Knows no memory.

A `kv` tensor is counted in token rows (a row is one token's keys and values), a state tensor in bytes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from functools import cached_property

import xxhash

from slipstream.types import AttentionLayer, LayerSpec

PROTOCOL_VERSION = "1"
MEMORY_ORDER = "kv[block,k|v,token,head,channel] conv[slot,q|k|v,column] recurrent[slot,value_head,key,value]"

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Kind(enum.Enum):
    """What a tensor holds."""

    KV = "kv"
    CONV = "conv"
    RECURRENT = "recurrent"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One named tensor of one layer."""

    name: str
    """Such as `layers.3.kv`."""
    layer: int
    """Index in the checkpoint's layer list."""
    kind: Kind
    unit_bytes: int
    """kv: bytes of one token row, keys and values together; a state: bytes of the whole slot."""


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Everything that both sides of a transfer must have in common."""

    model_name: str
    weights_revision: str
    """A fingerprint of the checkpoint's files."""
    layers: tuple[LayerSpec, ...]
    block_size: int
    kv_dtype: str
    conv_dtype: str
    recurrent_dtype: str = "float32"
    protocol: str = PROTOCOL_VERSION
    memory_order: str = MEMORY_ORDER

    def fields(self) -> dict[str, str]:
        """Field by field, for a Hello that can name what differs."""
        named = {field.name: str(getattr(self, field.name)) for field in fields(self) if field.name != "layers"}
        for number, layer in enumerate(self.layers):
            named[f"layer {number}"] = repr(layer)
        return named

    @cached_property
    def hash(self) -> str:
        """Equal exactly where `fields` are equal; stable across processes and machines."""
        text = "\n".join(f"{name}={value}" for name, value in sorted(self.fields().items()))
        return xxhash.xxh3_128_hexdigest(text.encode())

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """In layer order; a tensor's number on the wire is its index here."""
        found: list[TensorSpec] = []
        for number, layer in enumerate(self.layers):
            if isinstance(layer, AttentionLayer):
                row = 2 * layer.kv_heads * layer.head_size * _ITEM_BYTES[self.kv_dtype]
                found.append(TensorSpec(name=f"{layer.name}.kv", layer=number, kind=Kind.KV, unit_bytes=row))
                continue
            conv = sum(layer.conv_segments) * (layer.conv_width - 1) * _ITEM_BYTES[self.conv_dtype]
            state = layer.value_heads * layer.key_head_size * layer.value_head_size * _ITEM_BYTES[self.recurrent_dtype]
            found.append(TensorSpec(name=f"{layer.name}.conv", layer=number, kind=Kind.CONV, unit_bytes=conv))
            found.append(TensorSpec(name=f"{layer.name}.recurrent", layer=number, kind=Kind.RECURRENT, unit_bytes=state))
        return tuple(found)

    def units(self, tensor: TensorSpec, num_tokens: int) -> int:
        """How much of a tensor a prompt of `num_tokens` needs: rows, or bytes of state."""
        return num_tokens if tensor.kind is Kind.KV else tensor.unit_bytes

    def bytes_necessary(self, num_tokens: int) -> tuple[int, int]:
        """(KV bytes, state bytes) of so many tokens to send: slope * tokens, and a constant."""
        kv = sum(tensor.unit_bytes for tensor in self.tensors if tensor.kind is Kind.KV) * num_tokens
        return kv, sum(tensor.unit_bytes for tensor in self.tensors if tensor.kind is not Kind.KV)


def differences(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """`name: ours A, theirs B` for every field that differs; empty if none does."""
    names = sorted(ours.keys() | theirs.keys())
    return "; ".join(f"{name}: ours {ours.get(name, 'absent')}, theirs {theirs.get(name, 'absent')}"
                     for name in names if ours.get(name) != theirs.get(name))
