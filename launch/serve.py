"""A deployment in the foreground: starts it, lets something run in it, and ends it on a signal. Knows no command line."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from rich.console import Console

from launch.supervisor import Supervisor
from slipstream.config import Config
from slipstream.errors import ConfigError

T = TypeVar("T")

END_SECONDS = 30.0
"""What ending a deployment may take beside the drain of its routers: that of its workers, and giving its places back."""

INTERRUPTED = 130
"""Exit status after a second Ctrl-C, as a shell reports it."""

SAME_PRESS_SECONDS = 0.3
"""Two signals closer than this are one wish: a terminal, or `timeout`, may signal both a process and its group."""

Body = Callable[[tuple[str, ...], asyncio.Event], Awaitable[int]]
"""What to do once the deployment serves: gets the URLs and an event that asks it to end; returns the exit status."""


def run(config: Config, console: Console, body: Body) -> int:
    """Start the deployment, run `body`, drain and end everything; the exit status. Raises SlipstreamError if it cannot start.

    The first SIGINT or SIGTERM asks `body` to end and drains; the second one ends what is left at once.
    """
    return asyncio.run(_run(config, console, body))


def check_job(config: Config, stop_seconds: float | None) -> str:
    """What is to be said about `serve` as a Ray job, which is killed so long after it was asked to stop (None: it is none);
    empty: nothing. Raises ConfigError if it would start a Ray of its own inside the cluster."""
    if stop_seconds is None:
        return ""
    if not config.ray.address:
        raise ConfigError('a Ray job runs in a cluster that is there: set ray.address to "auto"', field="ray.address")
    if stop_seconds >= (needed := config.router.drain_seconds + END_SECONDS):
        return ""
    return (f"`ray job stop` kills this job after {stop_seconds:g} s, and what serves goes on; to drain may take {needed:g} s: "
            "set RAY_JOB_STOP_WAIT_TIME_S in the env_vars of the job's runtime environment")


async def until_stopped(urls: tuple[str, ...], stop: asyncio.Event) -> int:
    """The body of `slipstream serve`."""
    await stop.wait()
    return 0


async def _run(config: Config, console: Console, body: Body) -> int:
    stop, hurry = asyncio.Event(), asyncio.Event()
    catch = _signals(stop, hurry, console, config.router.drain_seconds)
    catch()
    started = time.monotonic()

    def report(text: str) -> None:
        console.print(f"{time.monotonic() - started:6.1f} s  {text}", markup=False, highlight=False, soft_wrap=True)

    # Ray's own handler of SIGTERM aborts the process: ours are put back in place once Ray has started.
    supervisor = Supervisor(config, report, on_ray=catch, on_lost=stop.set)
    status = 1
    try:
        with _waiting(console, supervisor):
            urls = await _unless(stop, supervisor.start())
        if urls is None:
            status = 0
        else:
            metrics = f"; metrics: http://{supervisor.metrics_address}/metrics" if supervisor.metrics_address else ""
            report(f"ready at {', '.join(urls)}; logs: {supervisor.log_dir}; supervisor: {supervisor.address}{metrics}")
            status = await body(urls, stop)
    finally:
        if not await supervisor.stop(hurry):
            status = INTERRUPTED if hurry.is_set() else status or 1
    return status


def _signals(stop: asyncio.Event, hurry: asyncio.Event, console: Console, drain_seconds: float) -> Callable[[], None]:
    """What installs our handlers, as often as it is called."""
    first = 0.0

    def on_signal() -> None:
        nonlocal first
        if stop.is_set():
            if time.monotonic() - first > SAME_PRESS_SECONDS:
                hurry.set()
            return
        first = time.monotonic()
        console.print(f"\nstopping; running answers may go on for {drain_seconds:g} s; press Ctrl-C again to stop at once",
                      markup=False, highlight=False)
        stop.set()

    def catch() -> None:
        for name in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(name, on_signal)

    return catch


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None if `stop` comes first."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        return await task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


@contextlib.contextmanager
def _waiting(console: Console, supervisor: Supervisor) -> Iterator[None]:
    """A spinner that names what does not serve yet; nothing where the output is no terminal."""
    async def update() -> None:
        while True:
            names = supervisor.waiting_for()
            spinner.update(f"waiting for {', '.join(names)}" if names else "waiting until the router has found its workers")
            await asyncio.sleep(0.2)

    with console.status("starting") as spinner:
        task = asyncio.create_task(update())
        try:
            yield
        finally:
            task.cancel()
