"""The table of operations, filled once from a backend's name and passed to every layer; knows no layer and no device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels import reference


@dataclass(frozen=True, kw_only=True)
class Row:
    """One operation of a table, for people to read."""

    op: str
    implementation: str
    """`module.function`, without the packages above."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """One implementation of every operation that a faster backend may replace; `reference` says what each computes."""

    name: str
    reason: str
    """Why this backend was chosen."""
    rms_norm: Callable[[Tensor, Tensor, float, bool], Tensor]
    gated_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    silu_mul: Callable[[Tensor, Tensor], Tensor]
    top_experts: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
    experts: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, tuple[float, float]], None]
    prefill_attention: Callable[[Tensor, Tensor, Tensor, int, tuple[float, float]], Tensor]
    decode_attention: Callable[[Tensor, Tensor, Tensor, Tensor, tuple[float, float], int], Tensor]
    """The last argument is 1 for a layer that drafts: a backend whose kernel skips no row takes the reference there."""
    causal_conv: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    gated_delta_chunks: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    gated_delta_step: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

    def rows(self) -> tuple[Row, ...]:
        """What runs for each operation, and why."""
        ops = [(field.name, getattr(self, field.name)) for field in fields(self) if field.name not in ("name", "reason")]
        return tuple(Row(op=op, implementation=f"{run.__module__.rpartition('.')[2]}.{run.__qualname__}", reason=self.reason)
                     for op, run in ops)


def _reference(reason: str) -> Kernels:
    return Kernels(
        name="reference", reason=reason, rms_norm=reference.rms_norm, gated_rms_norm=reference.gated_rms_norm,
        silu_mul=reference.silu_mul, top_experts=reference.top_experts, experts=reference.experts, rotary=reference.rotary,
        write_kv=reference.write_kv,
        prefill_attention=reference.prefill_attention, decode_attention=reference.decode_attention,
        causal_conv=reference.causal_conv, gated_delta_chunks=reference.gated_delta_chunks,
        gated_delta_step=reference.gated_delta_step)


def backends() -> dict[str, Callable[[str], Kernels]]:
    """Every backend by name, to be called with the reason of its choice. A backend's module is imported when it is chosen,
    so that a missing one costs nothing."""
    return {"reference": _reference}


def choose(name: str) -> Kernels:
    """The table of one backend. Raises ConfigError, naming the known ones, for an unknown name."""
    known = backends()
    if name not in known:
        raise ConfigError(f"unknown kernel backend {name!r}; known: {', '.join(sorted(known))}")
    return known[name](f"{name} was asked for" if len(known) > 1 else f"{name} is the only backend")
