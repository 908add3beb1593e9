"""Which processes a configuration asks for, and how each is started. Pure; knows neither Ray nor a process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import slipstream
from slipstream import config as config_module
from slipstream.config import Config
from slipstream.errors import PlacementError
from slipstream.types import Role

GPU_MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


@dataclass(frozen=True, kw_only=True)
class Member:
    """One process of a deployment."""

    name: str
    """`prefill-0`, `router-0`: unique in the deployment."""
    role: Role | None
    """None: a router."""
    pool: str
    """Name of the pool in the configuration; empty for a router."""
    cpus: float
    gpus: int
    env: Mapping[str, str]
    config: Config
    """The configuration that this process is given."""

    @property
    def kind(self) -> str:
        """`prefill`, `decode` or `router`."""
        return self.role.value if self.role is not None else "router"

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray reserves for it."""
        return {"CPU": self.cpus} | ({"GPU": float(self.gpus)} if self.gpus else {})

    @property
    def identity(self) -> str:
        """Equal for members that are started alike, by the same version. What only the supervisor reads, [ray] and the pools,
        does not count."""
        config = {key: value for key, value in config_module.to_dict(self.config).items() if key not in ("ray", "pools")}
        return json.dumps([slipstream.__version__, self.name, self.kind, self.cpus, self.gpus, dict(self.env), config],
                          sort_keys=True)

    def arguments(self, *, host: str, epoch: int, directory: str, port: int = 0) -> list[str]:
        """What follows `python -m`: workers listen on any free port of `host`, routers find them through `directory`.

        `port`: where a router is to listen, whatever its configuration says; 0: what that says.
        """
        router = dataclasses.replace(self.config.router, port=port or self.config.router.port)
        own = config_module.to_dict(dataclasses.replace(self.config, router=router))
        shared = ["--exit-with-parent", "--config-json", json.dumps(own)]
        if self.role is None:
            return [self.kind, *shared, "--directory", directory]
        return [self.kind, *shared, "--replica-id", self.name, "--epoch", str(epoch), "--listen", f"{host}:0"]


def members(config: Config) -> tuple[Member, ...]:
    """The processes of a deployment: replicas first, pool by pool, then routers."""
    result = []
    for pool, wanted in config.pools.items():
        threads = {"OMP_NUM_THREADS": str(config.engine.threads), "OMP_WAIT_POLICY": "passive"}
        result += [Member(name=f"{pool}-{index}", role=wanted.role, pool=pool, cpus=wanted.cpus, gpus=wanted.gpus,
                          env=threads | wanted.env, config=config) for index in range(wanted.replicas)]
    for index in range(config.router.replicas):
        port = config.router.port + index if config.router.port else 0
        own = dataclasses.replace(config, router=dataclasses.replace(config.router, port=port))
        result.append(Member(name=f"router-{index}", role=None, pool="", cpus=config.router.cpus, gpus=0,
                             env={"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}, config=own))
    return tuple(result)


def child_environment(inherited: Mapping[str, str], wanted: Mapping[str, str], gpu_ids: Sequence[str]) -> dict[str, str]:
    """The environment of a child: what its Ray worker has, without Ray's own variables, plus `wanted`.

    The child sees exactly the GPUs `gpu_ids`, through one kind of mask: HIP where Ray set HIP (AMD), CUDA elsewhere; an
    empty list hides them all. Raises PlacementError if the node hides GPUs by ROCR_VISIBLE_DEVICES: HIP indexes are relative
    to it, and two masks would hide more than either says.
    """
    result = {key: value for key, value in inherited.items() if not key.startswith("RAY_")}
    if gpu_ids and "ROCR_VISIBLE_DEVICES" in inherited:
        raise PlacementError("ROCR_VISIBLE_DEVICES is set on this node and would mask GPUs a second time; start Ray there "
                             "without it and use HIP_VISIBLE_DEVICES")
    for mask in GPU_MASKS:
        result.pop(mask, None)
    if not gpu_ids:
        result |= {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": ""}
    else:
        result["HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in inherited else "CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
    return result | dict(wanted)


def check_room(wanted: Sequence[Member], cpus: float, gpus: int) -> None:
    """Raise PlacementError if a machine that offers so many CPUs and GPUs, and that nobody can join, is too small for all."""
    left, free = cpus, gpus
    for member in wanted:
        free -= member.gpus
        if free < 0:
            raise PlacementError(f"{member.name} needs GPU {member.gpus} (pools.{member.pool}.gpus), but this machine has "
                                 f"{gpus} that PyTorch can use, {free + member.gpus} of them left; set it to 0 to compute on "
                                 "the CPU, or join a Ray cluster that has GPUs: ray.address")
        if member.cpus > left:
            text = explain(member.name, {"CPU": member.cpus}, {"127.0.0.1": {"CPU": cpus}}, {"CPU": left})
            raise PlacementError(f"{text}; ray.cpus says what this machine offers (0: as much as is needed)")
        left -= member.cpus


def explain(name: str, bundle: Mapping[str, float], nodes: Mapping[str, Mapping[str, float]], free: Mapping[str, float]) -> str:
    """Why `bundle` of process `name` has no place.

    `nodes` maps a node's address to all that it has, `free` is what the whole cluster has left. A bundle never spans nodes,
    so each node is measured by itself.
    """
    wanted = _amounts(bundle)
    lacking = {node: {key: value - total.get(key, 0.0) for key, value in bundle.items() if total.get(key, 0.0) < value}
               for node, total in nodes.items()}
    if all(lacking.values()):
        each = "; ".join(f"node {node} has {_amounts({key: nodes[node].get(key, 0.0) for key in bundle})}, "
                         f"missing {_amounts(short)}" for node, short in lacking.items())
        return f"no node is large enough for {name}, which needs {wanted} on one node: {each or 'the cluster has no node'}"
    rest = _amounts({key: free.get(key, 0.0) for key in bundle})
    return f"{name} needs {wanted} on one node, but what is free in the whole cluster is {rest}: the rest is reserved by others"


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in resources.items())
