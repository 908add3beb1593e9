"""Keeps a deployment alive: places its processes, waits until they serve, restarts those that die, drains and ends them.

Knows nothing of tokens or requests; what runs where is `launch.placement`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from launch import client, placement, probe, takeover
from launch.child import describe
from launch.directory import Directory, Endpoint
from launch.members import Member, check_room, members
from slipstream.config import Config
from slipstream.errors import LaunchError
from slipstream.rpc.server import join_address, listen, new_server, split_address
from slipstream.v1 import directory_pb2_grpc

WORKER_STOP_SECONDS = 10.0
FIRST_BACKOFF_SECONDS = 0.5
LAST_BACKOFF_SECONDS = 30.0
STEADY_SECONDS = 60.0
"""A process that served this long starts again without delay."""


@dataclass
class _Running:
    """A process that Ray has placed, as the supervisor sees it."""

    place: placement.Place
    port: int = 0
    """Where a router listened: the next epoch listens there again."""
    ready: dict[str, Any] | None = None
    """Its ready line; None while it does not serve."""
    since: float = 0.0

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
        self._leave = False
        """True: `stop` ends no process."""
        self._config = config
        self._report = report
        self._members = members(config)
        self._directory = Directory()
        self._server: grpc.aio.Server | None = None
        self._opening: asyncio.Future[placement.Session] | None = None
        self._over = threading.Event()
        self._running: list[_Running] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = False
        self._local = True
        self._directory_address = ""
        self._failed = self._adopted = False
        self.log_dir = Path(config.ray.log_dir or tempfile.mkdtemp(prefix="slipstream-logs-")).absolute()
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

    async def start(self) -> tuple[str, ...]:
        """Start everything and return the routers' URLs once each of them can take requests.

        Raises PlacementError when there is no room, LaunchError (with the end of its log) when a process ends or is late.
        """
        deadline = time.monotonic() + self._config.ray.start_seconds
        try:
            await self._place()
            await asyncio.gather(*(self._launch(one, deadline) for one in self._running if one.ready is None))
            for one in self._running:
                self._keepers.append(asyncio.create_task(self._keep(one), name=f"keep {one.member.name}"))
                self._keepers.append(asyncio.create_task(self._probe(one), name=f"probe {one.member.name}"))
            await asyncio.gather(*(self._healthy(url, deadline) for url in self.urls))
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
        self._over.set()
        return clean

    # -- starting ----------------------------------------------------------------------------------------------------

    async def _place(self) -> None:
        config = self._config.ray
        gpus = sum(one.gpus for one in self._members)
        cpus = config.cpus or sum(one.cpus for one in self._members)
        if not config.address:
            check_room(self._members, cpus, await asyncio.to_thread(placement.gpus_here) if gpus else 0)
        self._report(f"joining the Ray cluster at {config.address}" if config.address else "starting Ray on this machine")
        self._opening = self._open_session(cpus, gpus)
        session = await asyncio.shield(self._opening)
        self._local = session.is_local
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
            self._report(f"{one.member.name} goes on at {_where(one)} (pid {one.place.adopted['ready']['pid']})")
        for one in adopted:  # now that the Directory is complete
            if one.member.role is None:
                await one.place.tell({"directory": self._directory_address})

    async def _take_over(self) -> dict[str, placement.Place]:
        """Become the deployment's only supervisor; the processes of an earlier one that can be kept."""
        deployment, claim = self._config.ray.deployment, takeover.Claim()
        self._claim = claim
        await asyncio.to_thread(claim.take, deployment)
        self._keepers.append(asyncio.create_task(self._renew(claim), name="renew the lease"))
        left = await asyncio.to_thread(takeover.take_over, deployment, self._members, WORKER_STOP_SECONDS)
        self._adopted = bool(left)
        if left and not self._config.ray.log_dir:
            shutil.rmtree(self.log_dir)
            self.log_dir = Path(next(iter(left.values())).log)
            self.log_dir.mkdir(parents=True, exist_ok=True)
        return left

    async def _renew(self, claim: takeover.Claim) -> None:
        await claim.keep(lambda: [one.place for one in self._running])
        self._report("another supervisor has taken this deployment over; leaving it to that one")
        self._leave = self._stopping = True
        self._on_lost()

    def _open_session(self, cpus: float, gpus: int) -> asyncio.Future[placement.Session]:
        """Open the Ray session in a thread of its own, which nobody has to wait for should Ray hang.

        The thread stays until `stop`: the kernel ends Ray's processes together with the thread that started them.
        """
        loop = asyncio.get_running_loop()
        opening: asyncio.Future[placement.Session] = loop.create_future()
        opening.add_done_callback(lambda _: self._on_ray())

        def tell(action: Callable[[], None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waited
                loop.call_soon_threadsafe(lambda: None if opening.cancelled() else action())

        def run() -> None:
            try:
                ray = self._config.ray
                session = placement.Session(ray.address, ray.deployment, cpus=cpus, gpus=gpus)
            except Exception as error:
                failure = error
                tell(lambda: opening.set_exception(failure))
            else:
                tell(lambda: opening.set_result(session))
            self._over.wait()

        threading.Thread(target=run, name="ray session", daemon=True).start()
        return opening

    async def _launch(self, one: _Running, deadline: float) -> None:
        """Start the next epoch of a process and wait until it serves."""
        member, started = one.member, time.monotonic()
        if self._claim is not None:
            one.place.epoch = max(one.place.epoch, self._claim.epochs.get(member.name, 0))
        one.place.new_host()
        host = "127.0.0.1" if self._local else await one.place.address()
        arguments = member.arguments(host=host, epoch=one.place.epoch, directory=self._directory_address, port=one.port)
        await one.place.start(arguments, self.log_dir / f"{member.name}.log")
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

    async def _healthy(self, url: str, deadline: float) -> None:
        """Wait until a router has found its workers."""
        while True:
            problem = await asyncio.to_thread(client.health, url)
            if not problem:
                return
            if time.monotonic() > deadline:
                raise LaunchError(f"{url} is not healthy after {self._config.ray.start_seconds:.0f} s: {problem}")
            await asyncio.sleep(0.05)

    # -- keeping -----------------------------------------------------------------------------------------------------

    async def _keep(self, one: _Running) -> None:
        """Restart a process whenever it ends, with a new epoch and, if it keeps ending, growing pauses."""
        backoff = FIRST_BACKOFF_SECONDS
        while not self._stopping:
            how = await self._ended(one)
            if self._stopping:
                return
            one.ready = None
            self._directory.remove(one.member.name)
            if time.monotonic() - one.since > STEADY_SECONDS:
                backoff = FIRST_BACKOFF_SECONDS
            self._report(f"{one.member.name} ended with {how}; starting epoch {one.place.epoch + 1} in {backoff:g} s")
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, LAST_BACKOFF_SECONDS)
            try:
                await self._launch(one, time.monotonic() + self._config.ray.start_seconds)
            except LaunchError as error:
                self._report(f"{one.member.name} did not start: {error}")
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
                strikes = 0
                await one.place.end()

    async def _ended(self, one: _Running) -> str:
        """Wait for the end of a process, or of the actor that holds it; says how it ended."""
        if one.ready is None:
            return "a failed start"
        try:
            return describe(await one.place.wait())
        except LaunchError as error:
            return f"an error: {error}"

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
        if self._server is not None:
            await self._server.stop(grace=0.2)
        session = await self._opened(hurry)
        if session is not None:
            await asyncio.to_thread(self._give_back, session)
        if self._leave:
            self._report(f"what serves goes on without a supervisor; logs: {self.log_dir}")
            return
        if keep_logs and any(self.log_dir.iterdir()):
            self._report(f"logs: {self.log_dir}")
        elif not self._config.ray.log_dir:
            shutil.rmtree(self.log_dir, ignore_errors=True)

    async def _opened(self, hurry: asyncio.Event) -> placement.Session | None:
        """The session, if there is one: one that is still being opened has to be open before it can be closed.

        Only joining a cluster may hang, and what was not joined need not be left: `hurry` ends that wait.
        """
        if self._opening is None:
            return None
        hurried = asyncio.create_task(hurry.wait())
        waited: set[asyncio.Future[Any]] = {self._opening} | ({hurried} if self._config.ray.address else set())
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not self._opening.done() or self._opening.exception() is not None:
            return None
        return self._opening.result()

    def _give_back(self, session: placement.Session) -> None:
        if self._claim is not None and self._claim.held and not self._leave:
            takeover.take_over(self._config.ray.deployment, (), 0.0)
            self._claim.end()
        session.close()


def _where(one: _Running) -> str:
    assert one.ready is not None
    return str(one.ready["address"] if one.member.role is not None else one.ready["http"])
