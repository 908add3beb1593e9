"""Fake workers in a thread of their own, beside tests that block. Knows no router."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from slipstream.types import Role
from tests.support.fake_directory import FakeDirectory
from tests.support.fake_workers import FakeWorker, Plan, Script, Seen

T = TypeVar("T")
WAIT_SECONDS = 10.0


class Stage(Script):
    """A script whose workers live in a thread of their own; every method may be called from the test's thread."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted workers", daemon=True)
        self._thread.start()
        self._things: list[FakeWorker | FakeDirectory] = []

    def worker(self, role: Role, address: str = "127.0.0.1:0", **info: Any) -> FakeWorker:
        """A new replica that serves."""

        async def make() -> FakeWorker:
            worker = FakeWorker(self, role, **info)
            await worker.start(address)
            return worker

        worker = self.run(make())
        self._things.append(worker)
        return worker

    def directory(self) -> FakeDirectory:
        """A new directory that serves."""

        async def make() -> FakeDirectory:
            directory = FakeDirectory()
            await directory.start()
            return directory

        directory = self.run(make())
        self._things.append(directory)
        return directory

    def stop(self, thing: FakeWorker | FakeDirectory) -> None:
        self._things.remove(thing)
        self.run(thing.stop())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_SECONDS)

    def do(self, fn: Callable[[], T]) -> T:
        """Run `fn` in the workers' thread."""

        async def call() -> T:
            return fn()

        return self.run(call())

    def next(self, plan: Plan) -> None:
        """What becomes of the next request that has no plan yet."""
        self.plans.append(plan)

    def forget(self) -> None:
        """What was seen and planned so far."""
        self.do(self.seen.clear)
        self.plans.clear()

    def release(self, seen: Seen) -> None:
        self.do(seen.released.set)

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 5.0) -> None:
        """Poll a condition, in the caller's thread."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
            time.sleep(0.005)

    def close(self) -> None:
        for thing in list(self._things):
            self.stop(thing)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_SECONDS)
