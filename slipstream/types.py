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


@dataclass(frozen=True, kw_only=True)
class DraftLayer(AttentionLayer):
    """The layer behind the last one, which drafts tokens (multi-token prediction). Row j of its keys and values is of token j
    beside the model's output for token j - 1, so row 0 means nothing; its state is the output for the last token so far."""

    hidden_size: int


LayerSpec = AttentionLayer | LinearLayer
"""A DraftLayer is an AttentionLayer too."""

KvScales = tuple[tuple[float, float], ...]
"""For each layer of a checkpoint, what the keys and the values of a cache in FP8 are divided by; empty: they are not."""


# What a request is ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Grid:
    """An image's or a video's size in patches, before merging."""

    t: int
    h: int
    w: int
    t_step: float = 1.0
    """Positions from one t to the next; what is not whole is cut off."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Randomness is a pure function of (seed, choice, index), wherever the token is drawn."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Only this many of the most probable tokens; 0: all."""
    min_p: float = 0.0
    """Only tokens at least this share as probable as the most probable one."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token of the output so far."""
    frequency_penalty: float = 0.0
    """Taken off once for every time that the token is in the output so far."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens of the prompt and the output so far."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit); a token at most once."""
    logprobs: int | None = None
    """Most probable tokens to report with every token; None: report nothing, 0: only the token's own."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """The form that an answer must have."""

    text: str
    """As llguidance serialises it."""
    think_start: int | None = None
    """The token that may come first and begins what the form does not bind; None: there is none."""
    think_end: int | None = None
    """The token that ends it."""
    thinks: bool = False
    """The prompt has begun it already."""


@dataclass(frozen=True, kw_only=True)
class StopParams:
    """The token-level stops; stop strings are the router's."""

    max_tokens: int
    """Output tokens, at least 1; the first token, sampled by prefill, counts."""
    stop_token_ids: frozenset[int] = frozenset()
    """EOS ids included."""
    ignore_eos: bool = False
    """True: `stop_token_ids` do not stop."""
    min_tokens: int = 0
    """Output tokens before which no stop token can be drawn."""

    def barred(self, index: int) -> frozenset[int]:
        """Tokens that output `index` may not be."""
        return self.stop_token_ids if index < self.min_tokens and not self.ignore_eos else frozenset()


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
class Logprobs:
    """How probable a token was: log-softmax of the model's own logits, before bias, penalties, temperature and cuts."""

    logprob: float
    """The token's own."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob) of the most probable ones, best first; as many as were asked for."""


@dataclass(frozen=True, kw_only=True)
class PromptLogprobs:
    """How probable each token of a prompt but the first was, as in Logprobs: columns of Q rows, N most probable tokens each."""

    logprobs: tuple[float, ...] = ()
    """[Q]."""
    ranks: tuple[int, ...] = ()
    """[Q] 1: no token was more probable."""
    top_tokens: tuple[int, ...] = ()
    """[Q * N] row by row, best first."""
    top_logprobs: tuple[float, ...] = ()
    """[Q * N]."""

    def __len__(self) -> int:
        return len(self.logprobs)

    def row(self, number: int) -> Logprobs:
        """Of prompt token `number` + 1."""
        top = len(self.top_tokens) // len(self)
        some = slice(number * top, (number + 1) * top)
        return Logprobs(logprob=self.logprobs[number],
                        top=tuple(zip(self.top_tokens[some], self.top_logprobs[some], strict=True)))


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
    logprobs: Logprobs | None = None
    """Set iff the request asked for them."""
    prompt: PromptLogprobs | None = None
    """With the first token that is drawn after a prompt was computed here, if the request asked for them."""


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """A replica's load at one moment."""

    waiting: int
    running: int
    parked: int
    free_blocks: int
    """Blocks that a request could have now: unused ones, and cached ones that nobody reads."""
    total_blocks: int
    free_state_slots: int
    total_state_slots: int
    cached_blocks: int = 0
    """Blocks of the prefix cache, read or not."""
    waiting_tokens: int = 0
    """Of prompts: not computed yet."""


@dataclass(frozen=True, kw_only=True)
class EngineCounters:
    """What an engine has done since it started; every field only grows."""

    steps: int = 0
    step_seconds: float = 0.0
    step_tokens: int = 0
    """That went through the model in those steps."""
    prompt_tokens: int = 0
    """Of prompts that got their memory here to be computed, cached ones included."""
    cached_tokens: int = 0
    """Of those, the ones found in the prefix cache."""
    landed_tokens: int = 0
    """Of prompts that came from prefill, those already here included."""
    reused_tokens: int = 0
    """Of those, the ones that were here in the prefix cache, so that their KV did not travel."""
    output_tokens: int = 0
    """Drawn here."""
    spec_draft_tokens: int = 0
    """Drafts that were verified."""
    spec_accepted_tokens: int = 0
    """Of those, the ones that became output."""
    preemptions: int = 0
    evicted_blocks: int = 0
