"""Requests wait here for the turns that `router.admission` gives them. On the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from router.admission import Admission, Client, Phase, Turn
from slipstream.config import RouterConfig
from slipstream.errors import OverloadedError


class Limits:
    """How much work a router takes at once."""

    def __init__(self, config: RouterConfig, on_change: Callable[[], None]) -> None:
        """`on_change`: a request came, began or ended."""
        self.admission = Admission(max_running=config.max_in_flight, max_waiting=config.max_waiting,
                                   max_tokens=config.max_in_flight_tokens)
        self._seconds = config.max_waiting_seconds
        self._on_change = on_change
        self._turns: dict[Turn, asyncio.Future[None]] = {}

    @property
    def in_flight(self) -> int:
        """Requests that have entered and not left."""
        return self.admission.held

    def enter(self, client: Client, priority: int) -> Turn:
        """Count a request; whoever has entered calls `leave`. Raises OverloadedError."""
        turn, lost = self.admission.enter(client, priority, time.monotonic())
        self._tell(lost)
        return turn

    async def wait(self, turn: Turn, *, prompt_tokens: int, most_output: int) -> None:
        """Until it may run. Raises OverloadedError for one that waits too long, or loses its place to a better one."""
        self._tell(self.admission.ask(turn, prompt_tokens=prompt_tokens, most_output=most_output, now=time.monotonic()))
        if turn.phase is Phase.WAITING:
            mine = self._turns[turn] = asyncio.get_running_loop().create_future()
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(mine, self._seconds)
            finally:
                del self._turns[turn]
        if turn.refusal is not None:
            raise turn.refusal
        if turn.phase is Phase.WAITING:
            raise OverloadedError(f"the request waited {self._seconds:g} seconds for its turn (router.max_waiting_seconds); "
                                  "come back later", retry_after_seconds=1.0)

    def leave(self, turn: Turn, output_tokens: int = 0) -> None:
        """A request is over. Nothing happens the second time."""
        self._tell(self.admission.leave(turn, output_tokens=output_tokens, now=time.monotonic()))

    def _tell(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            if (waiting := self._turns.get(turn)) is not None and not waiting.done():
                waiting.set_result(None)
        self._on_change()
