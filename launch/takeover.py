"""What one supervisor of a deployment leaves in a joined Ray cluster for the next: a lease, and processes that serve.

Knows no process; Ray is imported inside functions, see `launch.placement`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from launch.members import Member
from launch.placement import ANSWER_SECONDS, Place, check_installed, host_name, prefix
from slipstream.errors import LaunchError

LEASE = "lease"
"""Name of the lease's actor among the deployment's actors; the others' are NAME/EPOCH."""
LEASE_SECONDS = 6.0
RENEW_SECONDS = 1.0
TAKE_SECONDS = 30.0
"""Longest wait for the first answer: the lease may have to be started."""


def take_over(deployment: str, wanted: Sequence[Member], grace_seconds: float, epochs: dict[str, int]) -> dict[str, Place]:
    """Places by name of the processes that an earlier supervisor of the deployment left, that serve, and that are as `wanted`
    says. Everything else that it left is ended, in order for at most `grace_seconds`. `epochs` is raised to what was found.
    Blocks."""
    import ray
    from ray.util.placement_group import get_placement_group, placement_group_table, remove_placement_group

    groups = {key: get_placement_group(row["name"]) for key, row in placement_group_table().items()
              if row["name"].startswith(prefix(deployment)) and row["state"] != "REMOVED"}
    hosts = {}
    for name in ray.util.list_named_actors():
        with contextlib.suppress(ValueError):  # it has just ended
            if name != LEASE:
                hosts[name] = ray.get_actor(name)
    states: dict[str, tuple[Any, dict[str, Any] | None]] = {
        name: (hosts[name], state) for name, state in _states(hosts).items()}
    named = {one.name: one for one in wanted}
    found: dict[str, Place] = {}
    started = {(who, int(epoch)) for who, epoch, *_ in (name.split("/") for name in hosts)}
    for who, epoch in sorted(started, key=lambda one: -one[1]):
        epochs[who] = max(epochs.get(who, 0), epoch)
        if who in found or (member := named.get(who)) is None:
            continue
        own = [states.get(host_name(who, epoch, rank), (None, None)) for rank in range(member.world)]
        if (group := _common_group(member, [state for _, state in own])) in groups:  # all of its ranks, or none
            found[who] = Place(member, groups.pop(group), lifetime="detached", hosts=[host for host, _ in own], epoch=epoch,
                               adopted=own[0][1])
            for rank in range(member.world):
                del states[host_name(who, epoch, rank)]
    surplus = list(states.values())
    # Without grace too: a child that is stopped or hangs does not see the end of its actor.
    if ending := [host.stop.remote(grace_seconds) for host, state in surplus if state is not None]:
        ray.wait(ending, num_returns=len(ending), timeout=grace_seconds + ANSWER_SECONDS)
    for host, _ in surplus:
        ray.kill(host)
    for group in groups.values():
        remove_placement_group(group)
    return found


def _common_group(member: Member, states: Sequence[dict[str, Any] | None]) -> str:
    """Id of the placement group in which each of these processes serves as `member` says; empty: not every one does."""
    groups = {state["group"] if state and state["ready"] and state["identity"] == member.identity else "" for state in states}
    return str(groups.pop() or "") if len(groups) == 1 else ""


def _states(hosts: Mapping[str, Any]) -> dict[str, dict[str, Any] | None]:
    """What Host.state says of each actor; None for one that does not answer."""
    import ray

    asked = {name: host.state.remote() for name, host in hosts.items()}
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_SECONDS)
    result: dict[str, dict[str, Any] | None] = {}
    for name in hosts:
        try:
            result[name] = ray.get(asked[name], timeout=0)
        except (ray.exceptions.RayError, TimeoutError):
            result[name] = None
    return result


class Claim:
    """One supervisor's right to a deployment of a joined cluster: a lease that it renews, kept by an actor."""

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment
        self._owner = f"{secrets.token_hex(4)}: process {os.getpid()} on {socket.gethostname()}"
        self._lease: Any = None
        self.held = False
        """True once it was taken."""
        self.epochs: dict[str, int] = {}
        """The highest epoch of each process so far, whoever started it; told to the lease at every renewal."""
        self.scaled: dict[str, tuple[int, int]] = {}
        """Replicas by pool, (as the configuration said then, as they were scaled to); told as `epochs` are."""

    async def take(self) -> None:
        """Wait until the last owner's lease is over. Raises LaunchError when its owner renews it, or nobody answers."""
        first: tuple[str, float] | None = None
        deadline = time.monotonic() + TAKE_SECONDS
        while not self.held:
            told = await self._ask()
            first = first or told
            if told is None and time.monotonic() > deadline:
                raise LaunchError(f"the Ray cluster did not start the lease of deployment {self._deployment}, an actor "
                                  f"without CPUs, in {TAKE_SECONDS:g} s")
            if told is not None and told[0] == self._owner:
                self.held = True
            elif told != first and told is not None:
                who = told[0].partition(": ")[2]
                raise LaunchError(f"deployment {self._deployment} of this cluster is kept by another supervisor ({who}); stop "
                                  "that one, or give this one another name: ray.deployment")
            else:
                await asyncio.sleep(RENEW_SECONDS / 2)

    async def renew(self) -> bool:
        """Renew it. False: another supervisor has the deployment now; True also while nobody can say."""
        told = await self._ask()
        return told is None or told[0] == self._owner

    async def keep(self) -> None:
        """Renew it until another supervisor has it."""
        while await self.renew():  # noqa: ASYNC110 (nothing here tells us when to renew)
            await asyncio.sleep(RENEW_SECONDS)

    def end(self) -> None:
        """Give it up."""
        import ray

        if self._lease is not None:
            ray.kill(self._lease)

    async def _ask(self) -> tuple[str, float] | None:
        """Take or renew it, if nobody else has it; whose it is now and when that was last said, None if nobody can say."""
        try:
            if self._lease is None:
                self._lease = await asyncio.to_thread(_lease)
            async with asyncio.timeout(ANSWER_SECONDS):
                owner, told, epochs, scaled = await self._lease.take.remote(self._owner, self.epochs, self.scaled)
        except TimeoutError:
            return None
        except Exception as error:  # its actor was ended, or Ray itself answers no more
            check_installed(error)
            self._lease = None
            return None
        self.epochs |= {name: max(epoch, self.epochs.get(name, 0)) for name, epoch in epochs.items()}
        self.scaled = {**scaled, **self.scaled}
        return owner, told


def _lease() -> Any:
    import ray

    options = {"name": LEASE, "get_if_exists": True, "lifetime": "detached", "num_cpus": 0, "max_restarts": -1}
    return ray.remote(Lease).options(**options).remote()


class Lease:
    """The actor that knows which supervisor a deployment belongs to, and outlives it."""

    def __init__(self) -> None:
        self._owner, self._told = "", -LEASE_SECONDS
        self._epochs: dict[str, int] = {}
        self._scaled: dict[str, tuple[int, int]] = {}

    def take(self, owner: str, epochs: Mapping[str, int], scaled: Mapping[str, tuple[int, int]]
             ) -> tuple[str, float, dict[str, int], dict[str, tuple[int, int]]]:
        """Take or renew it, if nobody else has it; whose it is now, when that was last said, all epochs so far, and what was
        scaled."""
        now = time.monotonic()
        if owner == self._owner or now - self._told > LEASE_SECONDS:
            self._owner, self._told = owner, now
            self._epochs |= epochs
            self._scaled |= scaled
        return self._owner, self._told, self._epochs, self._scaled
