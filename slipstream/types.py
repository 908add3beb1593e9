"""The nouns that every package speaks, as frozen dataclasses; knows no tensor, no wire format and no role's logic."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Role(enum.Enum):
    """Which half of a request a replica serves."""

    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(enum.Enum):
    """Why a choice ended; the values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"


# What a model keeps per sequence -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """A full-attention layer: keeps keys and values of every token, in paged blocks."""

    name: str
    """Weight prefix, such as `layers.3`; equal on every rank and in every process."""
    kv_heads: int
    head_size: int


@dataclass(frozen=True, kw_only=True)
class LinearLayer:
    """A Gated-DeltaNet layer: keeps a conv state and a recurrent state of fixed size per sequence."""

    name: str
    key_heads: int
    value_heads: int
    key_head_size: int
    value_head_size: int
    conv_width: int
    """Taps of the causal convolution; the state holds `conv_width - 1` raw columns."""

    @property
    def conv_segments(self) -> tuple[int, int, int]:
        """Channels of the q, k and v parts of the conv state, in this order: each is sharded by itself."""
        key = self.key_heads * self.key_head_size
        return key, key, self.value_heads * self.value_head_size


LayerSpec = AttentionLayer | LinearLayer


# What a request is ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Grid:
    """An image's or frame group's size in patches, before merging."""

    t: int
    h: int
    w: int


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Randomness is a pure function of (seed, choice, index), wherever the token is drawn."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class StopParams:
    """The token-level stops; stop strings are the router's."""

    max_tokens: int
    """Output tokens, at least 1; the first token, sampled by prefill, counts."""
    stop_token_ids: frozenset[int] = frozenset()
    """EOS ids included."""
    ignore_eos: bool = False
    """True: `stop_token_ids` do not stop."""


@dataclass(frozen=True, kw_only=True)
class RequestId:
    """Names one attempt at a request inside a process; every log line carries `name`."""

    name: str
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.name}#{self.attempt}" if self.attempt else self.name


@dataclass(frozen=True, kw_only=True)
class MropeState:
    """What decode needs to know of the prompt's positions: output token i sits at `prompt_tokens + i + delta`, all axes."""

    delta: int
    last_position: tuple[int, int, int]
    """Of the last prompt token; t, h, w."""


# What an engine step tells -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """One sampled token of one choice."""

    request: RequestId
    choice: int
    index: int
    """Output index of the token in its choice; 0 is the one that prefill samples."""
    token: int
    finish: FinishReason | None = None
    """Set on the token that ends the choice (a stop token is reported, and counted, but is no text)."""


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """A replica's load at one moment."""

    waiting: int
    running: int
    parked: int
    free_blocks: int
    total_blocks: int
    free_state_slots: int
    total_state_slots: int
