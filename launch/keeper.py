"""Keeps one replica or router of a deployment: starts it, waits until it serves, probes it, starts it again, ends it.

Knows neither the other members nor Ray, which is the business of its `launch.placement.Place`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch import client, placement, probe
from launch.child import describe
from launch.directory import Directory, Endpoint
from launch.members import Member
from launch.takeover import Claim
from slipstream.config import Config
from slipstream.errors import LaunchError, SlipstreamError
from slipstream.observability.supervisor_metrics import SupervisorMetrics
from slipstream.rpc.security import Security
from slipstream.rpc.server import split_address

FIRST_BACKOFF_SECONDS = 0.5
LAST_BACKOFF_SECONDS = 30.0
STEADY_SECONDS = 60.0
"""A member that served this long starts again after the first pause."""


def next_pause(last_seconds: float, served_seconds: float) -> float:
    """Pause before a member starts again: it doubles from start to start until one has served for STEADY_SECONDS."""
    if served_seconds > STEADY_SECONDS:
        return FIRST_BACKOFF_SECONDS
    return min(max(2 * last_seconds, FIRST_BACKOFF_SECONDS), LAST_BACKOFF_SECONDS)


@dataclass(kw_only=True)
class Deployment:
    """What the keepers of a deployment have in common."""

    config: Config
    report: Callable[[str], None]
    log_dir: Path
    metrics: SupervisorMetrics
    directory: Directory
    security: Security
    directory_address: str = ""
    claim: Claim | None = None
    epochs: dict[str, int] = field(default_factory=dict)
    """The highest epoch of each member so far; the claim's, if there is one."""
    is_local: bool = True
    stopping: bool = False
    """True: nothing is started any more."""
    restarted: bool = False
    """Something ended by itself: somebody may want to read why."""

    def guard(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task whose failure is told."""
        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.report(f"cannot {name} any more, a fault of ours: {error!r}")

        task = asyncio.create_task(work, name=name)
        task.add_done_callback(ended)
        return task


class Keeper:
    """One member, from `launch` or `adopt` to `end`."""

    def __init__(self, deployment: Deployment, place: placement.Place) -> None:
        self.place = place
        self.ready: dict[str, Any] | None = None
        """Its ready line, rank 0's of a replica; None while it does not serve."""
        self._deployment = deployment
        self._since = 0.0
        self._given_up = False  # its probes had it killed
        self._ports = (0, 0)  # where a router listened, for HTTP and gRPC: the next epoch listens there again
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def member(self) -> Member:
        """What it keeps."""
        return self.place.member

    @property
    def where(self) -> str:
        """Address of what serves."""
        assert self.ready is not None
        return str(self.ready["address"] if self.member.role is not None else self.ready["http"])

    def adopt(self) -> None:
        """Go on with what an earlier supervisor started."""
        assert self.place.adopted is not None
        self._serves(self.place.adopted["ready"])
        self._deployment.metrics.adopted(self.member.kind)
        self._deployment.report(f"{self.member.name} goes on at {self.where} (pid {self.place.adopted['ready']['pid']})")

    async def launch(self, deadline: float) -> None:
        """Start the next epoch and wait until it serves. Raises LaunchError, with the end of a log."""
        member, place, shared, started = self.member, self.place, self._deployment, time.monotonic()
        place.epoch = max(place.epoch, shared.epochs.get(member.name, 0))
        shared.epochs[member.name] = place.epoch + 1  # the lease knows the epoch before the process exists
        if shared.claim is not None and not await shared.claim.renew():
            raise LaunchError("the deployment is another supervisor's now")
        place.new_hosts()
        self._given_up = False
        try:
            async with asyncio.timeout(max(1.0, deadline - started)):
                await place.start(shared.directory_address, self._ports, shared.log_dir, local=shared.is_local)
        except TimeoutError as error:
            raise LaunchError(f"Ray gave {member.name} no room for {deadline - started:.0f} s: its node is gone, and no other "
                              "has room for it") from error
        ready = await place.ready(max(1.0, deadline - time.monotonic()))
        self._serves(ready)
        more = f", {member.world} ranks" if member.world > 1 else f", gRPC at {ready['grpc']}" if member.role is None else ""
        shared.report(f"{member.name} serves at {self.where} (pid {ready['pid']}{more}, {self._since - started:.1f} s)")

    def _serves(self, ready: dict[str, Any]) -> None:
        self.ready, self._since = ready, time.monotonic()
        if self.member.role is None:
            self._ports = split_address(ready["http"])[1], split_address(ready["grpc"])[1]
        else:
            self._deployment.directory.put(Endpoint(replica_id=self.member.name, role=self.member.role,
                                                    address=ready["address"], epoch=self.place.epoch))

    async def healthy(self, deadline: float) -> None:
        """Wait until a router has found its workers; one that was adopted may be ending, and is started again."""
        while True:
            problem = await asyncio.to_thread(client.health, self.ready["http"]) if self.ready is not None else "it has ended"
            if not problem and self.ready is not None:
                return
            if time.monotonic() > deadline:
                raise LaunchError(f"{self.member.name} is not healthy after "
                                  f"{self._deployment.config.ray.start_seconds:.0f} s: {problem}")
            await asyncio.sleep(0.05)

    # -- keeping -----------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """From now on start it again whenever it ends, and kill it when it hangs."""
        name = self.member.name
        self._tasks = [self._deployment.guard(self._keep(), f"keep {name}"),
                       self._deployment.guard(self._probe(), f"probe {name}")]

    async def _keep(self) -> None:
        """Each start has a new epoch and, if it keeps ending, comes after a growing pause."""
        shared, member, pause = self._deployment, self.member, 0.0
        while not shared.stopping:
            how = await self.ended()
            if shared.stopping:
                return
            reason = "failed_start" if self.ready is None else "unresponsive" if self._given_up else "ended"
            pause = next_pause(pause, time.monotonic() - self._since if self.ready is not None else 0.0)
            self.ready = None
            if member.role is not None:
                shared.directory.put(Endpoint(replica_id=member.name, role=member.role, epoch=self.place.epoch + 1,
                                              problem=f"ended with {how}"))
            shared.restarted = True
            shared.report(f"{member.name} ended with {how}; starting epoch {self.place.epoch + 1} in {pause:g} s")
            await asyncio.sleep(pause)
            shared.metrics.restarted(member.kind, reason)
            try:
                await self.launch(time.monotonic() + shared.config.ray.start_seconds)
            except Exception as error:
                shared.report(f"{member.name} did not start: {error if isinstance(error, SlipstreamError) else repr(error)}")
                await self.place.end()  # one that hangs would outlive its actor
                self.place.kill()

    async def _probe(self) -> None:
        """Kill what does not answer, or says that it cannot serve; `_keep` starts it again."""
        shared = self._deployment
        period = shared.config.ray.unresponsive_seconds / probe.STRIKES
        strikes, asked = 0, self.ready
        while True:
            pause = asyncio.create_task(asyncio.sleep(period))
            ready = self.ready
            finding = await probe.process(ready, period, shared.security) if ready is not None else probe.Finding.FINE
            await pause
            strikes = probe.count(strikes, finding) if self.ready is asked else 0
            asked = self.ready
            if strikes >= probe.STRIKES and not shared.stopping:
                silent = f"has not answered for {shared.config.ray.unresponsive_seconds:g} s"
                wrong = "says that it cannot serve (its log says why)"
                shared.report(f"{self.member.name} {wrong if finding is probe.Finding.WRONG else silent}; killing it")
                strikes, self._given_up = 0, True
                await self.place.end()

    async def ended(self) -> str:
        """Wait for the end; says how it ended. Where an actor cannot be reached, that is the end if no probe is answered
        either: a process ends with its actor, but need not end when Ray loses sight of that for a moment."""
        if (ready := self.ready) is None:
            return "a failed start"

        async def gone() -> bool:
            return await probe.process(ready, placement.ANSWER_SECONDS, self._deployment.security) is not probe.Finding.FINE

        try:
            return await self.place.wait(gone)
        except LaunchError as error:
            return f"an error: {error}"

    # -- ending ------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Watch no more; what serves goes on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def end(self, grace_seconds: float) -> bool:
        """Drain and end it; routers give it nothing new from now on. False, and told: not in order."""
        name, shared = self.member.name, self._deployment
        shared.directory.remove(name)
        if self.ready is None:
            return True
        try:
            code = await self.place.stop(grace_seconds)
        except LaunchError as error:
            shared.report(f"{name} could not be stopped in order: {error}")
            return False
        if code:
            shared.report(f"{name} ended with {describe(code)}")
        return not code

    async def remove(self, grace_seconds: float) -> None:
        """End it for good, and give its room back."""
        await self.close()
        served = self.ready is not None
        if await self.end(grace_seconds) and served:
            self._deployment.report(f"{self.member.name} has drained and ended")
        with contextlib.suppress(LaunchError):
            await self.place.end()
        self.place.kill()
        self.place.release()
