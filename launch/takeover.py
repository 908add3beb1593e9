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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from launch.members import Member
from launch.placement import ANSWER_SECONDS, Place, prefix
from slipstream.errors import LaunchError

LEASE = "lease"
"""Name of the lease's actor among the deployment's actors; the others' are NAME/EPOCH."""
LEASE_SECONDS = 6.0
RENEW_SECONDS = 1.0


def take_over(deployment: str, wanted: Sequence[Member], grace_seconds: float) -> dict[str, Place]:
    """Places by name of the processes that an earlier supervisor of the deployment left, that serve, and that are as `wanted`
    says. Everything else that it left is ended, in order for at most `grace_seconds`. Blocks."""
    import ray
    from ray.util.placement_group import get_placement_group, placement_group_table, remove_placement_group

    groups = {row["name"]: get_placement_group(row["name"]) for row in placement_group_table().values()
              if row["name"].startswith(prefix(deployment)) and row["state"] != "REMOVED"}
    by_member = {name.split("/")[2]: name for name in groups}
    named = {one.name: one for one in wanted}
    found: dict[str, Place] = {}
    surplus = []
    hosts = {name: ray.get_actor(name) for name in ray.util.list_named_actors() if name != LEASE}
    for name, (host, state) in _states(hosts).items():
        who, _, epoch = name.rpartition("/")
        member = named.get(who)
        if member is not None and who in by_member and who not in found and state is not None and state["ready"] is not None \
                and state["identity"] == member.identity:
            found[who] = Place(member, groups.pop(by_member[who]), lifetime="detached", host=host, epoch=int(epoch),
                               adopted=state)
        else:
            surplus.append(host)
    if surplus and grace_seconds > 0:
        ending = [host.stop.remote(grace_seconds) for host in surplus]
        ray.wait(ending, num_returns=len(ending), timeout=grace_seconds + ANSWER_SECONDS)
    for host in surplus:
        ray.kill(host)
    for group in groups.values():
        remove_placement_group(group)
    return found


def _states(hosts: Mapping[str, Any]) -> dict[str, tuple[Any, dict[str, Any] | None]]:
    """Each actor and what its Host.state says, latest epoch first; None for one that does not answer."""
    import ray

    asked = {name: host.state.remote() for name, host in hosts.items()}
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_SECONDS)
    result: dict[str, tuple[Any, dict[str, Any] | None]] = {}
    for name in sorted(hosts, key=lambda name: -int(name.rpartition("/")[2])):
        try:
            state = ray.get(asked[name], timeout=0)
        except (ray.exceptions.RayError, TimeoutError):
            state = None
        result[name] = (hosts[name], state)
    return result


class Claim:
    """One supervisor's right to a deployment of a joined cluster: a lease that it renews, kept by an actor."""

    def __init__(self) -> None:
        self._owner = f"{secrets.token_hex(4)}: process {os.getpid()} on {socket.gethostname()}"
        self.held = False
        """True once it was taken."""
        self.epochs: dict[str, int] = {}
        """The highest epoch of each process so far, whoever started it."""

    def take(self, deployment: str) -> None:
        """Blocks until the last owner's lease is over. Raises LaunchError when its owner renews it."""
        import ray

        first: tuple[str, float] | None = None
        while True:
            try:
                owner, told, self.epochs = ray.get(self._actor().take.remote(self._owner, {}), timeout=ANSWER_SECONDS)
            except (ray.exceptions.RayActorError, ValueError):  # its last owner has just ended it
                time.sleep(RENEW_SECONDS / 2)
                continue
            self.held = owner == self._owner
            if self.held:
                return
            first = first or (owner, told)
            if first != (owner, told):
                raise LaunchError(f"deployment {deployment} of this cluster is kept by another supervisor "
                                  f"({owner.partition(': ')[2]}); stop that one, or give this one another name: ray.deployment")
            time.sleep(RENEW_SECONDS / 2)

    async def keep(self, places: Callable[[], Iterable[Place]]) -> None:
        """Renew it, and note the epochs of `places`, until another supervisor has taken the deployment over."""
        import ray

        owner = self._owner
        while owner == self._owner:
            await asyncio.sleep(RENEW_SECONDS)
            self.epochs |= {place.member.name: place.epoch for place in places()}
            with contextlib.suppress(ray.exceptions.RayError, ValueError):  # nobody can say now
                owner, _, _ = await self._actor().take.remote(self._owner, self.epochs)

    def end(self) -> None:
        """Give it up."""
        import ray

        ray.kill(self._actor())

    def _actor(self) -> Any:
        import ray

        options = {"name": LEASE, "get_if_exists": True, "lifetime": "detached", "num_cpus": 0, "max_restarts": -1}
        return ray.remote(Lease).options(**options).remote()


class Lease:
    """The actor that knows which supervisor a deployment belongs to, and outlives it."""

    def __init__(self) -> None:
        self._owner, self._told = "", -LEASE_SECONDS
        self._epochs: dict[str, int] = {}

    def take(self, owner: str, epochs: Mapping[str, int]) -> tuple[str, float, dict[str, int]]:
        """Take or renew it, if nobody else has it; whose it is now, when that was last said, and all epochs so far."""
        now = time.monotonic()
        if owner == self._owner or now - self._told > LEASE_SECONDS:
            self._owner, self._told = owner, now
            self._epochs |= epochs
        return self._owner, self._told, self._epochs
