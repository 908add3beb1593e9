"""The engine thread: runs steps, and between them whatever other threads ask for. Knows no request and no network."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from slipstream.engine.engine import Engine, StepResult
from slipstream.errors import InternalError, UnavailableError

T = TypeVar("T")

logger = logging.getLogger(__name__)


class EngineLoop(threading.Thread):
    """Owns the engine: nobody else touches it while the thread lives.

    `on_step` is called on this thread after every step that has something to tell; it must not block, and may use the engine.
    `on_death` is called once, on this thread, if the loop ends by a fault of its own rather than by `stop`.
    """

    def __init__(self, engine: Engine, on_step: Callable[[StepResult], None],
                 on_death: Callable[[BaseException], None] | None = None) -> None:
        super().__init__(name="engine", daemon=True)
        self._engine = engine
        self._on_step = on_step
        self._on_death = on_death
        self._calls: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._over: BaseException | None = None  # set: no call will ever run

    def call(self, fn: Callable[[Engine], T]) -> Future[T]:
        """Run `fn(engine)` between two steps; its result or exception goes to the future.

        After the loop has ended the future fails at once: UnavailableError after `stop`, InternalError after a fault.
        """
        future: Future[T] = Future()
        with self._wake:
            over = self._over
            if over is None:
                self._calls.append((fn, future))
                self._wake.notify()
        if over is not None:
            future.set_exception(over)
        return future

    def stop(self, timeout: float | None = None) -> None:
        """End the thread after the running step and the calls made so far, and wait for it up to `timeout` seconds."""
        with self._wake:
            self._stopping = True
            if self.ident is None:
                self._over = UnavailableError("the engine was stopped before it started")
            self._wake.notify()
        if self.ident is not None and threading.current_thread() is not self:
            self.join(timeout)

    def run(self) -> None:
        """The thread's body."""
        over: BaseException = UnavailableError("the engine has stopped")
        fault: BaseException | None = None
        try:
            with torch.inference_mode():
                self._work()
        except BaseException as error:
            logger.critical("the engine loop ended by a fault", exc_info=error)
            fault, over = error, InternalError(f"the engine loop ended by a fault: {error!r}")
        with self._wake:
            self._over = over
            left = list(self._calls)
            self._calls.clear()
        for _, future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(over)
        if fault is not None and self._on_death is not None:
            self._on_death(fault)

    def _work(self) -> None:
        stalled = False  # the last step could run nothing: only a call can change that
        while True:
            with self._wake:
                while not self._calls and not self._stopping and (stalled or not self._engine.has_work):
                    self._wake.wait()
                calls = list(self._calls)
                self._calls.clear()
                stopping = self._stopping
            for fn, future in calls:
                stalled = False
                _run(fn, self._engine, future)
            if stopping:
                return
            if self._engine.has_work and not stalled:
                result = self._engine.step()
                stalled = result.stalled
                if result.events or result.failures:
                    self._on_step(result)


def _run(fn: Callable[[Engine], Any], engine: Engine, future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = fn(engine)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
