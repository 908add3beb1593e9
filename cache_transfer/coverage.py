"""Counts what one stream has sent or brought of one prompt, tensor by tensor. Pure; knows no peer and no memory.

Each tensor travels from its start to its end, so "exactly once" is "in order and complete".
"""

from __future__ import annotations

from collections.abc import Sequence

from cache_transfer.layout import Kind, Part, Range
from slipstream.errors import CoverageError, ProtocolError


class Coverage:
    """One prompt's progress on one side of one transfer."""

    def __init__(self, of: Part, num_tokens: int, have_tokens: int = 0) -> None:
        """`have_tokens`: of the prompt's beginning, that the destination has: their rows do not travel. Raises ProtocolError
        unless they are whole blocks of the prompt."""
        if have_tokens % of.block_size or not 0 <= have_tokens <= num_tokens:
            raise ProtocolError(f"the destination says that it has {have_tokens} of {num_tokens} tokens; it can only have "
                                f"whole blocks of {of.block_size}")
        self._tensors = of.tensors
        self.num_tokens = num_tokens
        self.done = [have_tokens if spec.kind is Kind.KV else 0 for spec in of.tensors]
        self.kv_bytes = 0
        self.state_bytes = 0

    def check(self, ranges: Sequence[Range]) -> None:
        """Raise ProtocolError unless the ranges go on exactly where their tensors stand, inside the prompt."""
        at = dict[int, int]()
        for part in ranges:
            if part.tensor >= len(self.done):
                raise ProtocolError(f"tensor {part.tensor} of {len(self.done)}")
            spec = self._tensors[part.tensor]
            expected = at.get(part.tensor, self.done[part.tensor])
            end = part.first + part.units
            if part.first != expected or not part.units or end > spec.units(self.num_tokens):
                raise ProtocolError(f"{spec.name}: got units {part.first} to {end}, expected to go on from {expected} up to "
                                    f"{spec.units(self.num_tokens)}")
            at[part.tensor] = end

    def add(self, ranges: Sequence[Range]) -> None:
        """Count ranges that were checked."""
        for part in ranges:
            spec = self._tensors[part.tensor]
            self.done[part.tensor] = part.first + part.units
            if spec.kind is Kind.KV:
                self.kv_bytes += part.units * spec.unit_bytes
            else:
                self.state_bytes += part.units

    @property
    def complete(self) -> bool:
        """True if every row and every byte has been counted."""
        return all(done == spec.units(self.num_tokens) for done, spec in zip(self.done, self._tensors, strict=True))

    def verify(self, kv_bytes: int, state_bytes: int) -> None:
        """Raise CoverageError unless everything is here, and as much as the source says it sent."""
        for done, spec in zip(self.done, self._tensors, strict=True):
            wanted = spec.units(self.num_tokens)
            if done != wanted:
                raise CoverageError(f"{spec.name}: {done} of {wanted} units arrived")
        if (kv_bytes, state_bytes) != (self.kv_bytes, self.state_bytes):
            raise CoverageError(f"{self.kv_bytes} KV and {self.state_bytes} state bytes arrived, {kv_bytes} and {state_bytes} "
                                "were sent")
