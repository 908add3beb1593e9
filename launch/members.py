"""Which replicas and routers a configuration asks for, and how each is started. Pure; knows neither Ray nor a process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import slipstream
from slipstream import config as config_module
from slipstream import sharding
from slipstream.checkpoint import Checkpoint
from slipstream.config import Config, PoolConfig
from slipstream.errors import ConfigError, PlacementError
from slipstream.types import Role

GPU_MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


@dataclass(frozen=True, kw_only=True)
class Member:
    """One replica, or one router, of a deployment: `world` processes that start and end together."""

    name: str
    """`prefill-0`, `router-0`: unique in the deployment."""
    pool: str
    """Name of the pool in the configuration; empty for a router."""
    spec: PoolConfig | None
    """Its pool; None: a router."""
    env: Mapping[str, str]
    config: Config
    """The configuration that its processes are given."""

    @property
    def role(self) -> Role | None:
        """None: a router."""
        return self.spec.role if self.spec is not None else None

    @property
    def kind(self) -> str:
        """`prefill`, `decode` or `router`."""
        return self.role.value if self.role is not None else "router"

    @property
    def tp(self) -> int:
        """Ranks of each bundle."""
        return self.spec.tp if self.spec is not None else 1

    @property
    def world(self) -> int:
        """Its processes."""
        return self.spec.tp * self.spec.pp if self.spec is not None else 1

    @property
    def labels(self) -> dict[str, str]:
        """What the labels of its nodes must be."""
        return self.spec.labels if self.spec is not None else {}

    @property
    def gpus(self) -> int:
        """Of each process."""
        return self.spec.gpus if self.spec is not None else 0

    @property
    def share(self) -> dict[str, float]:
        """What Ray reserves for each process."""
        if self.spec is None:
            return {"CPU": self.config.router.cpus}
        return {"CPU": self.spec.cpus} | ({"GPU": float(self.gpus)} if self.gpus else {}) | self.spec.resources

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray reserves for each stage; a bundle never spans nodes. There are `world / tp` of them."""
        return {key: round(value * self.tp, 4) for key, value in self.share.items()}

    @property
    def identity(self) -> str:
        """Equal for members that are started alike, by the same version. What only the supervisor reads, [ray] and the other
        pools, does not count, nor the number of replicas."""
        config = config_module.to_dict(self.config)
        own = config.pop("pools").get(self.pool, {}) | {"replicas": 0}
        del config["ray"]
        return json.dumps([slipstream.__version__, self.name, self.kind, own, self.share, dict(self.env), config],
                          sort_keys=True)

    def title(self, rank: int) -> str:
        """What a process is called in messages and in the name of its log."""
        return f"{self.name} rank {rank}" if rank else self.name

    def arguments(self, *, host: str, epoch: int, directory: str, ports: tuple[int, int] = (0, 0), rank: int = 0,
                  master: str = "") -> list[str]:
        """What follows `python -m`: workers listen on any free port of `host`, routers find them through `directory`.

        `ports`: where a router is to listen for HTTP and gRPC, whatever its configuration says; 0: what that says. `master`:
        where rank 0 of several listens for the others.
        """
        router = self.config.router
        router = dataclasses.replace(router, port=ports[0] or router.port,
                                     grpc=dataclasses.replace(router.grpc, port=ports[1] or router.grpc.port))
        own = config_module.to_dict(dataclasses.replace(self.config, router=router))
        shared = ["--exit-with-parent", "--config-json", json.dumps(own)]
        if self.role is None:
            return [self.kind, *shared, "--advertise", host, "--directory", directory]
        ranks = ["--rank", str(rank), "--world", str(self.world), "--master", master] if self.world > 1 else []
        return [self.kind, *shared, "--pool", self.pool, "--replica-id", self.name, "--epoch", str(epoch),
                "--listen", f"{host}:0", *ranks]


def members(config: Config) -> tuple[Member, ...]:
    """What a deployment has: replicas first, pool by pool, then routers."""
    result = []
    for pool, wanted in config.pools.items():
        threads = {"OMP_NUM_THREADS": str(config.engine.threads), "OMP_WAIT_POLICY": "passive"}
        result += [Member(name=f"{pool}-{index}", pool=pool, spec=wanted, env=threads | wanted.env, config=config)
                   for index in range(wanted.replicas)]
    for index in range(config.router.replicas):
        port, grpc = config.router.port, config.router.grpc
        grpc = dataclasses.replace(grpc, port=grpc.port + index if grpc.port > 0 else grpc.port)
        router = dataclasses.replace(config.router, port=port + index if port else 0, grpc=grpc)
        own = dataclasses.replace(config, router=router)
        result.append(Member(name=f"router-{index}", pool="", spec=None,
                             env={"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}, config=own))
    return tuple(result)


def check_geometries(config: Config, checkpoint: Checkpoint) -> None:
    """Raise ConfigError for a pool that does not cut the model evenly, listing what would."""
    for name, pool in config.pools.items():
        try:
            sharding.plan(checkpoint, tp=pool.tp, pp=pool.pp, stages=pool.stages, expert_parallel=pool.expert_parallel)
        except ConfigError as error:
            raise ConfigError(f"pools.{name}: {error.message}", field=f"pools.{name}.{error.field}") from error


def child_environment(inherited: Mapping[str, str], wanted: Mapping[str, str], gpu_ids: Sequence[str],
                      code: str = "") -> dict[str, str]:
    """The environment of a child: what its Ray worker has, without Ray's own variables, plus `wanted`. `code`: the folder that
    it is to import our packages from, where they are not installed.

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
    result |= wanted
    if code and code not in (known := result.get("PYTHONPATH", "").split(":")):
        result["PYTHONPATH"] = ":".join([code, *filter(None, known)])
    return result


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of a Ray cluster."""

    address: str
    """Where it is; several may be on one machine."""
    total: Mapping[str, float]
    """All that it has, whoever reserved it."""
    labels: Mapping[str, str] = field(default_factory=dict)


def check_room(wanted: Sequence[Member], cpus: float, gpus: int) -> None:
    """Raise PlacementError if a machine that offers so many CPUs and GPUs, and that nobody can join, is too small for all."""
    processes = sum(member.world for member in wanted)
    if wanted and processes > (most := wanted[0].config.ray.max_processes):
        raise PlacementError(f"the deployment would have {processes} processes on this machine, and ray.max_processes allows "
                             f"{most}")
    left, free = cpus, gpus
    for member in wanted:
        if member.spec is not None and (named := {*member.labels, *member.spec.resources}):
            raise PlacementError(f"{member.name} needs nodes with {', '.join(sorted(named))} (pools.{member.pool}.labels, "
                                 "resources), which a Ray that is started here does not have; join a cluster: ray.address")
        need = member.gpus * member.world
        free -= need
        if free < 0:
            raise PlacementError(f"{member.name} needs GPU {need} (pools.{member.pool}.gpus), but this machine has "
                                 f"{gpus} that PyTorch can use, {free + need} of them left; set it to 0 to compute on "
                                 "the CPU, or join a Ray cluster that has GPUs: ray.address")
        for _ in range(member.world // member.tp):
            if member.bundle["CPU"] > left:
                text = explain(member, [Node(address="127.0.0.1", total={"CPU": cpus})], {"CPU": left})
                raise PlacementError(f"{text}; ray.cpus says what this machine offers (0: as much as is needed)")
            left -= member.bundle["CPU"]


def explain(member: Member, nodes: Sequence[Node], free: Mapping[str, float]) -> str:
    """Which bundle of `member` has no place, and why. `free` is what the whole cluster has left."""
    bundle, stages = member.bundle, member.world // member.tp
    wanted = f"{_amounts(bundle)} on one node" + (f" with {_labels(member.labels)}" if member.labels else "")
    fit, lacking = 0, []
    for node in nodes:
        wrong = {key: value for key, value in member.labels.items() if not _matches(value, node.labels.get(key))}
        short = {key: value - node.total.get(key, 0.0) for key, value in bundle.items() if node.total.get(key, 0.0) < value}
        if not wrong and not short:
            fit += min(int(node.total[key] / value + 1e-6) for key, value in bundle.items() if value)
        has = _amounts({key: node.total.get(key, 0.0) for key in bundle})
        if wrong:
            has += f" and {_labels({key: node.labels.get(key, 'none') for key in wrong})}"
        missing = ([_amounts(short)] if short else []) + ([_labels(wrong)] if wrong else [])
        lacking.append(f"node {node.address} has {has}" + (f", missing {' and '.join(missing)}" if missing else ""))
    each = "; ".join(lacking) or "the cluster has no node"
    name = member.name if stages == 1 else f"stage {fit} of {member.name}"
    if fit == 0:
        return f"no node is large enough for {name}, which needs {wanted}: {each}"
    if fit < stages:
        return f"no node is left for {name}, which needs {wanted}; there is room for {fit} such: {each}"
    name = member.name if stages == 1 else f"each of the {stages} stages of {member.name}"
    rest = _amounts({key: free.get(key, 0.0) for key in bundle})
    return f"{name} needs {wanted}, but what is free in the whole cluster is {rest}: the rest is reserved by others"


def _matches(wanted: str, value: str | None) -> bool:
    """As Ray reads a label selector."""
    no, rest = wanted.startswith("!"), wanted.removeprefix("!")
    known = rest[3:-1].split(",") if rest.startswith("in(") and rest.endswith(")") else [rest]
    return (value in [one.strip() for one in known]) is not no


def _labels(labels: Mapping[str, str]) -> str:
    return ", ".join(f"label {key} {value}" for key, value in labels.items())


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in resources.items())
