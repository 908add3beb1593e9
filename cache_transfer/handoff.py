"""The record that travels with the bytes: what decode needs and cannot see in them. Knows no wire format."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.types import MropeState

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class HandoffChoice:
    """One choice's first token."""

    first_token: int
    choice: int = 0
    """Its number in the request."""
    finished: bool = False
    """The first token ended the choice: there is nothing to decode."""


@dataclass(frozen=True, kw_only=True)
class Handoff:
    """Sent once by the source's rank 0, when the first token of every choice is drawn."""

    request_id: str
    prompt_tokens: int
    state_token_count: int
    """The recurrent state is the state after exactly so many tokens; equal to `prompt_tokens`, or the bytes are useless."""
    choices: tuple[HandoffChoice, ...]
    mrope: MropeState
    cached_tokens: int = 0
    """Prompt tokens that prefill did not have to compute."""

    @property
    def finished(self) -> bool:
        """True if no choice goes on: the bytes are not needed."""
        return all(choice.finished for choice in self.choices)
