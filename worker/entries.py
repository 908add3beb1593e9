"""What the log of a replica of several ranks says of transfers, beside what it says of steps. Knows no engine."""

from __future__ import annotations

from slipstream.engine.log import Beat, CopyBlock, CopyState, End, Entry, Step, Tokens
from slipstream.types import RequestId


class Expect(Entry, frozen=True):
    """A prompt will leave."""

    transfer_id: str
    request: RequestId
    num_tokens: int


class Allocated(Entry, frozen=True):
    """Where it lies."""

    transfer_id: str
    blocks: tuple[int, ...]
    state_slot: int | None
    cached_tokens: int


class Finish(Entry, frozen=True):
    """It is computed."""

    transfer_id: str


class Fail(Entry, frozen=True):
    """It is given up."""

    transfer_id: str
    code: str
    message: str


class Close(Entry, frozen=True):
    """All of its destination has it."""

    transfer_id: str


class Load(Entry, frozen=True):
    """A prompt comes, and lands here."""

    number: int
    addresses: tuple[str, ...]
    """CacheStores of the source, by rank."""
    transfer_id: str
    attempt: int
    source_epoch: int
    request_id: str
    remaining_seconds: float
    num_tokens: int
    blocks: tuple[int, ...]
    state_slot: int | None
    have_tokens: int


class CancelLoad(Entry, frozen=True):
    """Stop a load; LoadEnded comes when nothing writes any more."""

    number: int


class EndLoad(Entry, frozen=True):
    """All ranks have their parts, or one has not: the source may let go."""

    number: int
    committed: bool


Down = Step | CopyBlock | CopyState | Beat | Expect | Allocated | Finish | Fail | Close | Load | CancelLoad | EndLoad | End


# Up -------------------------------------------------------------------------------------------------------------------


class Serving(Entry, frozen=True):
    """The rank's CacheStore listens, and its caches are there."""

    address: str


class LoadEnded(Entry, frozen=True):
    """Nothing of a load writes any more on this rank."""

    number: int
    kv_bytes: int = 0
    state_bytes: int = 0
    seconds: float = 0.0
    code: str = ""
    """Why it failed; empty: its part is here and verified."""
    message: str = ""


Up = Tokens | Beat | Serving | LoadEnded
