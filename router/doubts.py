"""Which replicas a request should rather not meet again, after what has happened to it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from slipstream.errors import SlipstreamError, TransferError

FAILED, COMPLAINED = 2, 1


class Doubts:
    """Of one request. A failure speaks against the replica that reports it; but one that reports that a transfer failed is
    alive, which its peer may not be: it takes seconds until a silent host is known to be gone, and by then every run through
    it could have failed."""

    def __init__(self) -> None:
        self._levels = Counter[str]()

    def failed(self, by: str, peer: str | None, error: SlipstreamError) -> None:
        """A leg failed at `by`; `peer` has the other leg of the run, if there is one."""
        if peer is not None and isinstance(error, TransferError):
            self._levels.update({by: COMPLAINED, peer: FAILED})
        else:
            self._levels[by] += FAILED

    def levels(self, also: Collection[str] = ()) -> Mapping[str, int]:
        """By replica, how much speaks against it. `also`: replicas of which others think ill."""
        return self._levels + Counter(dict.fromkeys(also, FAILED))
