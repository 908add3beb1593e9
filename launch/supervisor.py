"""A deployment: places its replicas and routers, waits until they serve, changes their number, drains and ends them.

Knows nothing of tokens or requests; what runs where is `launch.placement`'s business, each member's life `launch.keeper`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import grpc.aio
from prometheus_client import CollectorRegistry

from launch import placement, session, takeover
from launch.directory import Directory
from launch.keeper import Deployment, Keeper
from launch.members import Member, check_room, members
from slipstream import config as config_module
from slipstream.config import Config
from slipstream.errors import ConfigError, LaunchError, UnavailableError
from slipstream.observability.supervisor_metrics import SupervisorMetrics
from slipstream.rpc import security
from slipstream.rpc.server import join_address, listen, new_server
from slipstream.v1 import directory_pb2_grpc
from worker.metrics import MetricsServer, metrics_target, reachable

WORKER_STOP_SECONDS = 10.0
AFTER_DRAIN_SECONDS = 5.0
"""How long a process may take to end once it has drained."""
SCRATCH = "slipstream-logs-"
"""What the names of log folders begin with that nobody asked for."""


class Supervisor:
    """One deployment, from `start` to `stop`; `report` gets a line of text for people whenever something happens."""

    def __init__(self, config: Config, report: Callable[[str], None], on_ray: Callable[[], None] = lambda: None,
                 on_lost: Callable[[], None] = lambda: None) -> None:
        """`on_ray` is called on the event loop once Ray has started, which takes signal handlers of its own; `on_lost` when
        another supervisor has taken the deployment over: `stop` leaves the processes to it then."""
        trusted = security.load(config.security)
        self._on_ray, self._on_lost = on_ray, on_lost
        self._renewal: asyncio.Task[None] | None = None
        self._leave = False
        """True: `stop` ends no process."""
        self._config = self._configured = config
        self._gpus = 0  # of this machine, where Ray is started here
        self._report = report
        self._members = members(config)
        self._server: grpc.aio.Server | None = None
        self._opening: session.Opening | None = None
        self._keepers: list[Keeper] = []
        self._failed = self._adopted = False
        self._serving = False
        self._scaling = asyncio.Lock()
        self._scales: set[asyncio.Task[dict[str, int]]] = set()
        self._launches: list[asyncio.Task[None]] = []
        self.metrics_address = ""
        """Where GET /metrics is answered; empty: nowhere."""
        self._metrics = SupervisorMetrics(CollectorRegistry(), [one.kind for one in self._members], lambda: [
            one.member.kind for one in self._keepers if one.ready is not None])
        self._metrics_server = MetricsServer(self._metrics.registry)
        log_dir = Path(config.ray.log_dir or tempfile.mkdtemp(prefix=SCRATCH)).absolute()
        log_dir.mkdir(parents=True, exist_ok=True)
        self._deployment = Deployment(config=config, report=report, log_dir=log_dir, metrics=self._metrics,
                                      security=trusted,
                                      directory=Directory(self.scale))

    @property
    def urls(self) -> tuple[str, ...]:
        """HTTP addresses of the routers that serve."""
        return tuple(f"http://{one.where}" for one in self._routers() if one.ready is not None)

    @property
    def address(self) -> str:
        """Where its Directory is served."""
        return self._deployment.directory_address

    @property
    def log_dir(self) -> Path:
        """Folder of the processes' logs."""
        return self._deployment.log_dir

    def waiting_for(self) -> list[str]:
        """Names of what does not serve yet."""
        served = {one.member.name for one in self._keepers if one.ready is not None}
        return [member.name for member in self._members if member.name not in served]

    def _routers(self) -> list[Keeper]:
        return [one for one in self._keepers if one.member.role is None]

    async def start(self) -> tuple[str, ...]:
        """Start everything and return the routers' URLs once each of them can take requests.

        Raises PlacementError when there is no room, LaunchError (with the end of its log) when a process ends or is late.
        """
        deadline = time.monotonic() + self._config.ray.start_seconds
        try:
            await self._place()
            for one in self._keepers:
                if one.place.adopted is not None:
                    one.keep()
            await self._launch([one for one in self._keepers if one.place.adopted is None], deadline)
            await asyncio.gather(*(one.healthy(deadline) for one in self._routers()))
        except Exception:
            self._failed = True
            self._leave |= self._adopted
            raise
        self._serving = True
        return self.urls

    async def stop(self, hurry: asyncio.Event) -> bool:
        """Drain the routers, then the workers, give the places back and end the Ray session if it was started here.

        Setting `hurry`, at any time, ends what is left without draining. True: every process ended in order.
        """
        self._deployment.stopping = True
        claim = self._deployment.claim
        if claim is not None and claim.held and not self._leave:
            self._leave = not await claim.renew()
        draining = asyncio.create_task(self._drain())
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        clean = not self._failed and not hurry.is_set() and not self._leave
        await self._close(hurry, keep_logs=not clean or self._deployment.restarted)
        if self._opening is not None:
            self._opening.over.set()
        return clean

    # -- starting ----------------------------------------------------------------------------------------------------

    async def _place(self) -> None:
        config, shared = self._config.ray, self._deployment
        if not config.address:
            self._gpus = await asyncio.to_thread(session.gpus_here) if any(one.gpus for one in self._members) else 0
            check_room(self._members, config.cpus or session.MANY_CPUS, self._gpus)
        self._report(f"joining the Ray cluster at {config.address}" if config.address else "starting Ray on this machine")
        self._opening = session.Opening(config.address, config.deployment, config.cpus or session.MANY_CPUS, self._gpus,
                                        self._on_ray)
        ray = await asyncio.shield(self._opening.session)
        shared.is_local = ray.is_local
        await self._serve_metrics(ray)
        left = {} if ray.is_local else await self._take_over()
        self._keepers = await self._reserve(self._members, left)
        self._server = new_server(shared.security)  # not before Ray forked its processes: gRPC's threads and fork do not mix
        directory_pb2_grpc.add_DirectoryServicer_to_server(shared.directory, self._server)
        shared.directory_address = await listen(self._server, join_address(ray.own_address, 0), shared.security)
        adopted = [one for one in self._keepers if one.place.adopted is not None]
        for one in adopted:
            one.adopt()
        for one in adopted:  # now that the Directory is complete
            if one.member.role is None:
                with contextlib.suppress(LaunchError):  # it has just ended; its keeper finds that
                    await one.place.tell({"directory": shared.directory_address})

    async def _reserve(self, wanted: Sequence[Member], left: Mapping[str, placement.Place]) -> list[Keeper]:
        config, lifetime = self._config.ray, None if self._deployment.is_local else "detached"
        places = await asyncio.to_thread(placement.reserve, wanted, left, config.deployment, config.placement_seconds,
                                         lifetime=lifetime)
        return [Keeper(self._deployment, place) for place in places]

    async def _launch(self, new: Sequence[Keeper], deadline: float) -> None:
        """Start all of them, and keep them once they serve."""
        self._launches = [asyncio.create_task(one.launch(deadline)) for one in new]
        try:
            await asyncio.gather(*self._launches)
        finally:
            for launch in self._launches:
                launch.cancel()
        for one in new:
            one.keep()

    async def _serve_metrics(self, ray: session.Session) -> None:
        wanted, here = self._config.ray.metrics_listen, join_address(ray.own_address, 0)
        if target := metrics_target(here, None if wanted == "auto" else wanted):
            try:
                self.metrics_address = reachable(await self._metrics_server.listen(target), here, here)
            except ConfigError as error:
                raise ConfigError(error.message.replace("--metrics-listen", "ray.metrics_listen"),
                                  field="ray.metrics_listen") from error

    async def _take_over(self) -> dict[str, placement.Place]:
        """Become the deployment's only supervisor; what an earlier one left and can be kept."""
        deployment, shared = self._config.ray.deployment, self._deployment
        shared.claim = claim = takeover.Claim(deployment)
        await claim.take()
        shared.epochs = claim.epochs
        self._renewal = shared.guard(self._renew(claim), "renew the lease")
        self._adopted = True  # until we know better: whatever goes wrong now, what serves goes on
        # A number that was changed in the configuration since is newer than the one it was scaled to.
        self._want(config_module.scaled(self._config, {
            pool: after for pool, (before, after) in claim.scaled.items()
            if pool in self._config.pools and self._config.pools[pool].replicas == before}))
        left = await asyncio.to_thread(takeover.take_over, deployment, self._members, WORKER_STOP_SECONDS, claim.epochs)
        self._adopted = bool(left)
        if left and not self._config.ray.log_dir:
            shutil.rmtree(shared.log_dir)
            shared.log_dir = Path(next(iter(left.values())).log)
            shared.log_dir.mkdir(parents=True, exist_ok=True)
        return left

    async def _renew(self, claim: takeover.Claim) -> None:
        await claim.keep()
        self._report("another supervisor has taken this deployment over; leaving it to that one")
        self._leave = self._deployment.stopping = True
        self._on_lost()

    # -- scaling -----------------------------------------------------------------------------------------------------

    async def scale(self, replicas: Mapping[str, int]) -> dict[str, int]:
        """Give pools other numbers of replicas; those of every pool, once what came serves and what left has drained.

        What comes comes first: if it does not serve, nothing has changed. Raises ConfigError, PlacementError, LaunchError and,
        while the deployment starts or ends, UnavailableError.
        """
        if not self._serving or self._deployment.stopping:
            raise UnavailableError("the deployment is not up: it is starting or ending", retry_after_seconds=1.0)
        task = asyncio.create_task(self._scale(replicas))  # whoever asked may go away
        self._scales.add(task)
        task.add_done_callback(self._scaled)
        return await asyncio.shield(task)

    def _scaled(self, task: asyncio.Task[dict[str, int]]) -> None:
        self._scales.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report(f"not scaled: {error}")

    async def _scale(self, replicas: Mapping[str, int]) -> dict[str, int]:
        async with self._scaling:
            wanted = config_module.scaled(self._config, replicas)
            goal, have = members(wanted), {one.member.name for one in self._keepers}
            if self._deployment.is_local:
                check_room(goal, wanted.ray.cpus or session.MANY_CPUS, self._gpus)
            new = await self._reserve([one for one in goal if one.name not in have], {})
            try:
                await self._launch(new, time.monotonic() + wanted.ray.start_seconds)
            except BaseException as error:
                if not self._leave:
                    await asyncio.gather(*(one.remove(0.0) for one in new))
                if isinstance(error, asyncio.CancelledError) and self._deployment.stopping:
                    raise UnavailableError("the deployment is ending") from error
                raise
            names = {one.name for one in goal}
            gone = [one for one in self._keepers if one.member.name not in names]
            self._keepers = [one for one in self._keepers if one not in gone] + new
            self._want(wanted)
            self._report(f"scaled to {', '.join(f'{name} {pool.replicas}' for name, pool in wanted.pools.items())}")
            if (claim := self._deployment.claim) is not None:
                claim.scaled = {name: (self._configured.pools[name].replicas, pool.replicas)
                                for name, pool in wanted.pools.items()}
                await claim.renew()
            await asyncio.gather(*(one.remove(wanted.router.drain_seconds + AFTER_DRAIN_SECONDS) for one in gone))
            return {name: pool.replicas for name, pool in wanted.pools.items()}

    def _want(self, config: Config) -> None:
        self._config, self._members = config, members(config)
        self._metrics.wants(one.kind for one in self._members)

    # -- ending ------------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        for launch in self._launches:
            launch.cancel()
        if self._leave:
            return
        await asyncio.gather(*self._scales, return_exceptions=True)
        workers = [one for one in self._keepers if one.member.role is not None]
        for some, seconds in ((self._routers(), self._config.router.drain_seconds + AFTER_DRAIN_SECONDS),
                              (workers, WORKER_STOP_SECONDS)):
            ended = await asyncio.gather(*(one.end(seconds) for one in some))
            self._failed |= not all(ended)

    async def _close(self, hurry: asyncio.Event, *, keep_logs: bool) -> None:
        for scale in self._scales:
            scale.cancel()
        await asyncio.gather(*self._scales, *(one.close() for one in self._keepers), return_exceptions=True)
        self._deployment.directory.close()
        self._metrics_server.close()
        if self._server is not None:
            await self._server.stop(grace=0.2)
        ray = await self._opening.opened(hurry) if self._opening is not None else None
        if ray is not None:
            await self._give_back(ray, 0.0 if hurry.is_set() else WORKER_STOP_SECONDS)
        if self._leave:
            self._report(f"what serves goes on; logs: {self.log_dir}")
            return
        if keep_logs and any(self.log_dir.iterdir()):
            self._report(f"logs: {self.log_dir}")
        elif not self._config.ray.log_dir and self.log_dir.name.startswith(SCRATCH):
            shutil.rmtree(self.log_dir, ignore_errors=True)

    async def _give_back(self, ray: session.Session, grace_seconds: float) -> None:
        """Leave the cluster as it was, unless the processes are to go on; the lease is ours until the end of that."""
        claim = self._deployment.claim
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
            await asyncio.to_thread(ray.close)
