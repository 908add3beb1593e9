"""Requests and results as frozen dataclasses; knows no wire format. Ranges are the router's to check (docs/api.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "other"]
"""`other`: one that this version does not know."""
Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn; None: as the checkpoint says."""

    temperature: float | None = None
    """0: greedy."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """The same seed, choice and prompt give the same tokens."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """When a choice ends, besides the model's own end."""

    max_tokens: int | None = None
    """None: what the context leaves. 0, in GenerateRequest: none."""
    strings: Sequence[str] = ()
    """Not part of the text."""
    token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0


@dataclass(frozen=True)
class Image:
    """A picture: the bytes of a PNG, JPEG, WebP, GIF or BMP file, or a URL: a data URL, or http(s) where the router fetches."""

    data: bytes | str


@dataclass(frozen=True)
class Video:
    """Frames of one size; two or more."""

    frames: Sequence[Image]
    fps: float | None = None
    timestamps: Sequence[float] | None = None
    """Seconds of each frame, instead of `fps`."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: Role
    parts: Sequence[str | Image | Video]


def system(text: str) -> Message:
    """What the model is told beforehand."""
    return Message("system", (text,))


def user(*parts: str | Image | Video) -> Message:
    """What the user says and shows."""
    return Message("user", parts)


def assistant(text: str) -> Message:
    """What the model answered before."""
    return Message("assistant", (text,))


@dataclass(frozen=True, kw_only=True)
class Options:
    """What both kinds of requests have."""

    model: str = ""
    """Empty: the model that the router serves."""
    sampling: Sampling = field(default_factory=Sampling)
    stop: Stop = field(default_factory=Stop)
    n: int = 1
    """Choices."""
    logprobs: int | None = None
    """Likeliest tokens to report with each token; None: report nothing."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt, which is then computed whole, whatever is cached."""
    priority: int = 0
    """Lower goes first."""
    cache_salt: str = ""
    """Requests of different salts share no cached prompt."""


@dataclass(frozen=True)
class GenerateRequest(Options):
    """Continue a text, or token ids."""

    prompt: str | Sequence[int]


@dataclass(frozen=True)
class ChatRequest(Options):
    """Answer a conversation."""

    messages: Sequence[Message]


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """One token, and how likely the model found it."""

    token: int
    text: bytes
    """What it adds; bytes, since a character may be cut."""
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    """The likeliest ones in its place, where they were asked for."""
    rank: int = 0
    """Of a prompt's token, 1 if none was likelier; of others 0."""


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What is new of one choice."""

    choice: int
    text: str = ""
    reasoning: str = ""
    """The model's thinking, where the router tells it apart; a delta has this or `text`."""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    """Set in a choice's last one."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompt, those that had not to be computed."""
    reasoning_tokens: int | None = None
    """Of the completion; None: not known."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One whole answer."""

    text: str
    finish_reason: FinishReason
    reasoning: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A whole result."""

    choices: tuple[Choice, ...]
    usage: Usage
    request_id: str
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the prompt's tokens but the first, where they were asked for."""

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a router serves."""

    id: str
    max_context: int
    """Tokens of a prompt and its output together."""
    takes_images: bool
    takes_videos: bool
    created: int
    """Seconds since 1970: when the router started."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One worker behind a router."""

    id: str
    role: str
    state: str
    waiting: int
    running: int
    parked: int
    free_blocks: int
    total_blocks: int


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much a router has to do."""

    problem: str
    """Why it takes no requests; empty: it takes them."""
    in_flight: int
    max_in_flight: int
    replicas: tuple[Replica, ...]
