"""Keeps a deployment alive: places its processes, waits until they serve, restarts those that die, drains and ends them.

Knows nothing of tokens or requests; what runs where is `launch.placement`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry

from launch import client, placement, probe, takeover
from launch.child import describe
from launch.directory import Directory, Endpoint
from launch.members import Member, check_room, members
from slipstream.config import Config
from slipstream.errors import ConfigError, LaunchError, SlipstreamError
from slipstream.observability.supervisor_metrics import SupervisorMetrics
from slipstream.rpc.server import join_address, listen, new_server, split_address
from slipstream.v1 import directory_pb2_grpc
from worker.metrics import MetricsServer, metrics_target, reachable

WORKER_STOP_SECONDS = 10.0
FIRST_BACKOFF_SECONDS = 0.5
LAST_BACKOFF_SECONDS = 30.0
STEADY_SECONDS = 60.0
"""A process that served this long starts again after the first pause."""
SCRATCH = "slipstream-logs-"
"""What the names of log folders begin with that nobody asked for."""


def next_pause(last_seconds: float, served_seconds: float) -> float:
    """Pause before a process starts again: it doubles from start to start until one has served for STEADY_SECONDS."""
    if served_seconds > STEADY_SECONDS:
        return FIRST_BACKOFF_SECONDS
    return min(max(2 * last_seconds, FIRST_BACKOFF_SECONDS), LAST_BACKOFF_SECONDS)


@dataclass
class _Running:
    """A process that Ray has placed, as the supervisor sees it."""

    place: placement.Place
    port: int = 0
    """Where a router listened: the next epoch listens there again."""
    ready: dict[str, Any] | None = None
    """Its ready line; None while it does not serve."""
    since: float = 0.0
    given_up: bool = False
    """Its probes had it killed."""

    @property
    def member(self) -> Member:
        return self.place.member


class Supervisor:
    """One deployment, from `start` to `stop`; `report` gets a line of text for people whenever something happens."""

    def __init__(self, config: Config, report: Callable[[str], None], on_ray: Callable[[], None] = lambda: None,
                 on_lost: Callable[[], None] = lambda: None) -> None:
        """`on_ray` is called on the event loop once Ray has started, which takes signal handlers of its own; `on_lost` when
        another supervisor has taken the deployment over: `stop` leaves the processes to it then."""
        self._on_ray, self._on_lost = on_ray, on_lost
        self._claim: takeover.Claim | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._leave = False
        """True: `stop` ends no process."""
        self._config = config
        self._report = report
        self._members = members(config)
        self._directory = Directory()
        self._server: grpc.aio.Server | None = None
        self._opening: placement.Opening | None = None
        self._running: list[_Running] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = False
        self._local = True
        self._directory_address = ""
        self._failed = self._adopted = False
        self.metrics_address = ""
        """Where GET /metrics is answered; empty: nowhere."""
        self._metrics = SupervisorMetrics(CollectorRegistry(), [one.kind for one in self._members], self._serving)
        self._metrics_server = MetricsServer(self._metrics.registry)
        self.log_dir = Path(config.ray.log_dir or tempfile.mkdtemp(prefix=SCRATCH)).absolute()
        self.log_dir.mkdir(parents=True, exist_ok=True)

    @property
    def urls(self) -> tuple[str, ...]:
        """HTTP addresses of the routers that serve."""
        routers = [one for one in self._running if one.member.role is None]
        return tuple(f"http://{one.ready['http']}" for one in routers if one.ready is not None)

    def waiting_for(self) -> list[str]:
        """Names of the processes that do not serve yet."""
        served = {one.member.name for one in self._running if one.ready is not None}
        return [member.name for member in self._members if member.name not in served]

    def _serving(self) -> Iterable[str]:
        return [one.member.kind for one in self._running if one.ready is not None]

    async def start(self) -> tuple[str, ...]:
        """Start everything and return the routers' URLs once each of them can take requests.

        Raises PlacementError when there is no room, LaunchError (with the end of its log) when a process ends or is late.
        """
        deadline = time.monotonic() + self._config.ray.start_seconds
        try:
            await self._place()
            new = [one for one in self._running if one.place.adopted is None]
            self._keep_all(one for one in self._running if one.place.adopted is not None)
            launches = [asyncio.create_task(self._launch(one, deadline)) for one in new]
            try:
                await asyncio.gather(*launches)
            finally:
                for launch in launches:
                    launch.cancel()
            self._keep_all(new)
            await asyncio.gather(*(self._healthy(one, deadline) for one in self._running if one.member.role is None))
        except Exception:
            self._failed = True
            self._leave |= self._adopted
            raise
        return self.urls

    async def stop(self, hurry: asyncio.Event) -> bool:
        """Drain the routers, then the workers, give the places back and end the Ray session if it was started here.

        Setting `hurry`, at any time, ends what is left without draining. True: every process ended in order.
        """
        self._stopping = True
        if self._claim is not None and self._claim.held and not self._leave:
            self._leave = not await self._claim.renew()
        routers = [one for one in self._running if one.member.role is None]
        workers = [one for one in self._running if one.member.role is not None]
        draining = asyncio.create_task(self._drain(*([], []) if self._leave else (routers, workers)))
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        clean = not self._failed and not hurry.is_set() and not self._leave
        await self._close(hurry, keep_logs=not clean)
        if self._opening is not None:
            self._opening.over.set()
        return clean

    # -- starting ----------------------------------------------------------------------------------------------------

    async def _place(self) -> None:
        config = self._config.ray
        gpus = sum(one.gpus for one in self._members)
        cpus = config.cpus or sum(one.cpus for one in self._members)
        if not config.address:
            check_room(self._members, cpus, await asyncio.to_thread(placement.gpus_here) if gpus else 0)
        self._report(f"joining the Ray cluster at {config.address}" if config.address else "starting Ray on this machine")
        self._opening = placement.Opening(config.address, config.deployment, cpus, gpus, self._on_ray)
        session = await asyncio.shield(self._opening.session)
        self._local = session.is_local
        await self._serve_metrics(session)
        left = {} if self._local else await self._take_over()
        places = await asyncio.to_thread(placement.reserve, self._members, left, config.deployment, config.placement_seconds,
                                         lifetime=None if self._local else "detached")
        self._running = [_Running(place) for place in places]
        self._server = new_server()  # not before Ray forked its processes: gRPC's threads and fork do not mix
        directory_pb2_grpc.add_DirectoryServicer_to_server(self._directory, self._server)
        self._directory_address = await listen(self._server, join_address(session.own_address, 0))
        adopted = [one for one in self._running if one.place.adopted is not None]
        for one in adopted:
            assert one.place.adopted is not None
            self._serves(one, one.place.adopted["ready"])
            self._metrics.adopted(one.member.kind)
            self._report(f"{one.member.name} goes on at {_where(one)} (pid {one.place.adopted['ready']['pid']})")
        for one in adopted:  # now that the Directory is complete
            if one.member.role is None:
                with contextlib.suppress(LaunchError):  # it has just ended; its keeper finds that
                    await one.place.tell({"directory": self._directory_address})

    async def _serve_metrics(self, session: placement.Session) -> None:
        wanted, here = self._config.ray.metrics_listen, join_address(session.own_address, 0)
        if target := metrics_target(here, None if wanted == "auto" else wanted):
            try:
                self.metrics_address = reachable(await self._metrics_server.listen(target), here, here)
            except ConfigError as error:
                raise ConfigError(error.message.replace("--metrics-listen", "ray.metrics_listen"),
                                  field="ray.metrics_listen") from error

    async def _take_over(self) -> dict[str, placement.Place]:
        """Become the deployment's only supervisor; the processes of an earlier one that can be kept."""
        deployment = self._config.ray.deployment
        self._claim = claim = takeover.Claim(deployment)
        await claim.take()
        self._renewal = self._guard(self._renew(claim), "renew the lease")
        self._adopted = True  # until we know better: whatever goes wrong now, what serves goes on
        left = await asyncio.to_thread(takeover.take_over, deployment, self._members, WORKER_STOP_SECONDS, claim.epochs)
        self._adopted = bool(left)
        if left and not self._config.ray.log_dir:
            shutil.rmtree(self.log_dir)
            self.log_dir = Path(next(iter(left.values())).log)
            self.log_dir.mkdir(parents=True, exist_ok=True)
        return left

    async def _renew(self, claim: takeover.Claim) -> None:
        await claim.keep()
        self._report("another supervisor has taken this deployment over; leaving it to that one")
        self._leave = self._stopping = True
        self._on_lost()

    async def _launch(self, one: _Running, deadline: float) -> None:
        """Start the next epoch of a process and wait until it serves."""
        member, started = one.member, time.monotonic()
        if (claim := self._claim) is not None:  # the lease knows the epoch before the process exists
            one.place.epoch = max(one.place.epoch, claim.epochs.get(member.name, 0))
            claim.epochs[member.name] = one.place.epoch + 1
            if not await claim.renew():
                raise LaunchError("the deployment is another supervisor's now")
        one.place.new_host()
        one.given_up = False
        try:
            async with asyncio.timeout(max(1.0, deadline - started)):
                host = "127.0.0.1" if self._local else await one.place.address()
                arguments = member.arguments(host=host, epoch=one.place.epoch, directory=self._directory_address, port=one.port)
                await one.place.start(arguments, self.log_dir / f"{member.name}.log")
        except TimeoutError as error:
            raise LaunchError(f"Ray gave {member.name} no room for {deadline - started:.0f} s: its node is gone, and no other "
                              "has room for it") from error
        ready = await one.place.ready(max(1.0, deadline - time.monotonic()))
        self._serves(one, ready)
        self._report(f"{member.name} serves at {_where(one)} (pid {ready['pid']}, {one.since - started:.1f} s)")

    def _serves(self, one: _Running, ready: dict[str, Any]) -> None:
        one.ready, one.since = ready, time.monotonic()
        if one.member.role is None:
            one.port = split_address(ready["http"])[1]
        else:
            self._directory.put(Endpoint(replica_id=one.member.name, role=one.member.role, address=ready["address"],
                                         epoch=one.place.epoch))

    async def _healthy(self, one: _Running, deadline: float) -> None:
        """Wait until a router has found its workers; one that was adopted may be ending, and is started again."""
        while True:
            problem = await asyncio.to_thread(client.health, one.ready["http"]) if one.ready is not None else "it has ended"
            if not problem and one.ready is not None:
                return
            if time.monotonic() > deadline:
                raise LaunchError(f"{one.member.name} is not healthy after {self._config.ray.start_seconds:.0f} s: {problem}")
            await asyncio.sleep(0.05)

    # -- keeping -----------------------------------------------------------------------------------------------------

    def _keep_all(self, some: Iterable[_Running]) -> None:
        for one in some:
            self._keepers += [self._guard(self._keep(one), f"keep {one.member.name}"),
                              self._guard(self._probe(one), f"probe {one.member.name}")]

    def _guard(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task whose failure is told."""
        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._report(f"cannot {name} any more, a fault of ours: {error!r}")

        task = asyncio.create_task(work, name=name)
        task.add_done_callback(ended)
        return task

    async def _keep(self, one: _Running) -> None:
        """Restart a process whenever it ends, with a new epoch and, if it keeps ending, growing pauses."""
        pause = 0.0
        while not self._stopping:
            how = await self._ended(one)
            if self._stopping:
                return
            reason = "failed_start" if one.ready is None else "unresponsive" if one.given_up else "ended"
            pause = next_pause(pause, time.monotonic() - one.since if one.ready is not None else 0.0)
            one.ready = None
            self._directory.remove(one.member.name)
            self._report(f"{one.member.name} ended with {how}; starting epoch {one.place.epoch + 1} in {pause:g} s")
            await asyncio.sleep(pause)
            self._metrics.restarted(one.member.kind, reason)
            try:
                await self._launch(one, time.monotonic() + self._config.ray.start_seconds)
            except Exception as error:
                self._report(f"{one.member.name} did not start: {error if isinstance(error, SlipstreamError) else repr(error)}")
                await one.place.end()  # one that hangs would outlive its actor
                one.place.kill()

    async def _probe(self, one: _Running) -> None:
        """Kill a process that does not answer, or says that it cannot serve; `_keep` starts it again."""
        period = self._config.ray.unresponsive_seconds / probe.STRIKES
        strikes, asked = 0, one.ready
        while True:
            pause = asyncio.create_task(asyncio.sleep(period))
            finding = await probe.process(one.ready, period) if one.ready is not None else probe.Finding.FINE
            await pause
            strikes = probe.count(strikes, finding) if one.ready is asked else 0
            asked = one.ready
            if strikes >= probe.STRIKES and not self._stopping:
                silent = f"has not answered for {self._config.ray.unresponsive_seconds:g} s"
                wrong = "says that it cannot serve (its log says why)"
                self._report(f"{one.member.name} {wrong if finding is probe.Finding.WRONG else silent}; killing it")
                strikes, one.given_up = 0, True
                await one.place.end()

    async def _ended(self, one: _Running) -> str:
        """Wait for the end of a process; says how it ended. One whose actor cannot be reached is at its end when it answers no
        probe either: it ends with its actor, but need not end when Ray loses sight of that for a moment."""
        if one.ready is None:
            return "a failed start"
        while True:
            try:
                return describe(await one.place.wait())
            except LaunchError as error:
                if await probe.process(one.ready, placement.ANSWER_SECONDS) is not probe.Finding.FINE:
                    return f"an error: {error}"
            await asyncio.sleep(FIRST_BACKOFF_SECONDS)

    # -- ending ------------------------------------------------------------------------------------------------------

    async def _drain(self, routers: Sequence[_Running], workers: Sequence[_Running]) -> None:
        await asyncio.gather(*(self._end(one, self._config.router.drain_seconds + 5) for one in routers))
        await asyncio.gather(*(self._end(one, WORKER_STOP_SECONDS) for one in workers))

    async def _end(self, one: _Running, grace_seconds: float) -> None:
        if one.ready is None:
            return
        self._directory.remove(one.member.name)
        try:
            code = await one.place.stop(grace_seconds)
        except LaunchError as error:
            self._failed = True
            self._report(f"{one.member.name} could not be stopped in order: {error}")
            return
        if code:
            self._failed = True
            self._report(f"{one.member.name} ended with {describe(code)}")

    async def _close(self, hurry: asyncio.Event, *, keep_logs: bool) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._directory.close()
        self._metrics_server.close()
        if self._server is not None:
            await self._server.stop(grace=0.2)
        session = await self._opening.opened(hurry) if self._opening is not None else None
        if session is not None:
            await self._give_back(session, 0.0 if hurry.is_set() else WORKER_STOP_SECONDS)
        if self._leave:
            self._report(f"what serves goes on; logs: {self.log_dir}")
            return
        if keep_logs and any(self.log_dir.iterdir()):
            self._report(f"logs: {self.log_dir}")
        elif not self._config.ray.log_dir and self.log_dir.name.startswith(SCRATCH):
            shutil.rmtree(self.log_dir, ignore_errors=True)

    async def _give_back(self, session: placement.Session, grace_seconds: float) -> None:
        """Leave the cluster as it was, unless the processes are to go on; the lease is ours until the end of that."""
        claim = self._claim
        try:
            if claim is not None and not self._leave and await claim.renew() and (claim.held or not claim.epochs):
                await asyncio.to_thread(takeover.take_over, self._config.ray.deployment, (), grace_seconds, {})
                if self._renewal is not None:
                    self._renewal.cancel()
                claim.end()
        except Exception as error:
            self._failed = True
            self._report(f"could not give everything back to the cluster: {error!r}")
        finally:
            if self._renewal is not None:
                self._renewal.cancel()
            await asyncio.to_thread(session.close)


def _where(one: _Running) -> str:
    assert one.ready is not None
    return str(one.ready["address"] if one.member.role is not None else one.ready["http"])
