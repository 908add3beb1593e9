"""The only reader of configuration files and of the environment: TOML plus `a.b=c` overrides into frozen dataclasses."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream import config_rules, typed
from slipstream.config_access import GrpcConfig, SecurityConfig
from slipstream.config_fetch import FetchConfig
from slipstream.config_routing import RoutingConfig
from slipstream.errors import ConfigError
from slipstream.types import Role


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """[model]: which checkpoint is served, and as what."""

    path: str = "demo"
    """A checkpoint folder, a hub id (`Qwen/Qwen3-0.6B`) whose files lie in the local hub cache, or `demo` for the checkpoint
    that ships inside the product. Its generation_config.json says how tokens are drawn where a request does not."""
    served_name: str = ""
    """The name that clients use; empty: the folder's name."""
    dtype: str = "auto"
    """`float32`, `bfloat16`, or `auto`: float32 on CPU, the checkpoint's own on a GPU."""
    device: str = "auto"
    """`cpu`, `cuda` (also names ROCm devices), or `auto`: a GPU if torch sees one."""

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.served_name or Path(self.path).name.partition("@")[0]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """[engine]: the memory and the step size of every worker."""

    block_size: int = 16
    """Tokens per KV block; must be equal on both sides."""
    kv_cache_tokens: int = 65536
    """Tokens of KV that a replica holds, over all sequences."""
    kv_dtype: str = "auto"
    """`auto`: the model's dtype; `fp8_e4m3`: a byte, divided by each layer's `k_scale`, `v_scale` or 1. Equal on both sides."""
    state_dtype: str = "float32"
    """Recurrent states between steps; `bfloat16` halves them, and rounds with every token. Must be equal on both sides."""
    max_running: int = 64
    """Sequences in one step; also the number of recurrent-state slots."""
    max_batch_tokens: int = 1024
    """Token budget of one step: decode tokens first, then prefill chunks."""
    prefill_chunk_tokens: int = 0
    """Longest piece of one prompt in one step; 0: only the token budget limits it."""
    max_context: int = 0
    """Longest prompt plus output; 0: the checkpoint's own limit."""
    growth_tokens: int = 256
    """Output tokens for which a sequence has memory from the start; it grows block by block after that."""
    prefix_cache: bool = True
    """Keep what was computed, and find it again for prompts that begin alike."""
    state_snapshots: int = 64
    """Recurrent states that a prefill replica of a hybrid model keeps for the prefix cache, and a decode replica where
    `router.routing.load_tokens` or `local_prefill_tokens` is above 0; each needs as much memory as a running sequence's. 0:
    prompts of hybrid models are always computed from their start."""
    threads: int = 1
    """Torch threads of a CPU rank."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """[speculative]: tokens are drafted and several verified in one step; output is the same, decoding is faster."""

    tokens: int = 0
    """Drafts of a sequence in one step, 0 to 3, by the multi-token prediction of Qwen3.5 and Qwen3-Next checkpoints (`mtp.*`
    weights); 0: none. Each takes a recurrent-state slot more of a decode replica. 0 on both sides, or on neither."""


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """[pools.NAME]: replicas of one role. At least one pool of each role is needed."""

    role: Role
    """`prefill` or `decode`."""
    replicas: int = 1
    """Replicas of this pool, called `NAME-0`, `NAME-1` and so on."""
    tp: int = 1
    """Tensor parallelism: ranks among which the heads of every layer are split."""
    pp: int = 1
    """Pipeline parallelism: stages among which the layers are split; a replica has `tp * pp` processes, its ranks."""
    stages: tuple[int, ...] = ()
    """Layers of each stage; empty: balanced."""
    expert_parallel: bool = False
    """Tensor ranks split the routed experts among them, instead of the channels of every expert."""
    cpus: float = 1.0
    """Ray CPUs that each rank reserves; a stage's `tp` ranks are placed on one node."""
    gpus: int = 0
    """Ray GPUs that each rank reserves; its process sees these and no others."""
    resources: dict[str, float] = field(default_factory=dict)
    """Other Ray resources that each rank reserves, by the names that `ray start --resources` gave them."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels that a node must have (`ray start --labels`): `zone = "a"`, also `"!a"`, `"in(a,b)"` or `"!in(a,b)"`."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment of the worker processes, set before they import anything."""


@dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """[transfer.faults]: a source's sick channel, for tests and drills. Rates are per frame; all are off by default."""

    seed: int = 0
    """Of the random choices."""
    delay_seconds: float = 0.0
    """Longest extra wait of a frame; each waits a random part of it."""
    drop: float = 0.0
    """Share of frames that are lost."""
    duplicate: float = 0.0
    """Share of frames that come twice."""
    corrupt: float = 0.0
    """Share of frames with wrong bytes."""
    cut: float = 0.0
    """Share of frames at which the stream breaks."""
    stall_at_bytes: int = 0
    """After so many bytes nothing moves any more; 0: never."""
    bytes_per_second: float = 0.0
    """What all streams of one source rank share; 0: no limit."""


@dataclass(frozen=True, kw_only=True)
class RdmaConfig:
    """[transfer.rdma]: the one-sided channel."""

    engine: str = "auto"
    """`nixl` or `mooncake`; `auto` takes the first of them that is installed. Both sides need the same."""
    quarantine_seconds: float = 10.0
    """How long a source on another host that does not say that it has stopped writing is waited for, before what it may write
    to is closed."""


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """[transfer]: the cache-store channel between prefill and decode."""

    channel: str = "auto"
    """How the bytes travel: `grpc` (inline, everywhere), `local` (same host), `rdma` (one-sided, NIXL or Mooncake); `auto`
    tries for each pair of ranks what both have, best first."""
    checksum: bool = True
    """Every frame carries a checksum of its bytes, which the destination verifies in its own memory."""
    stall_seconds: float = 10.0
    """A transfer of which nothing moves for so long is given up."""
    rdma: RdmaConfig = field(default_factory=RdmaConfig)
    """A section of its own."""
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    """A section of its own."""
    lease_seconds: float = 30.0
    """How long prefill keeps a finished prompt that no decode replica has taken."""
    parked_fraction: float = 0.25
    """Share of prefill's blocks that prompts without a ready destination may hold."""
    frame_bytes: int = 2 << 20
    """Payload of one data frame."""
    connect_seconds: float = 5.0
    """Longest wait for a peer's Hello."""
    image_store_bytes: int = 256 << 20
    """Pixels that a prefill replica keeps for requests to come."""


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """[router]: the front door and its limits."""

    replicas: int = 1
    """Router processes."""
    host: str = "127.0.0.1"
    """Address that HTTP listens on; `0.0.0.0`: every interface."""
    port: int = 8000
    """0: any free port. The second router of a deployment listens on the port after it, and so on."""
    cpus: float = 0.5
    """Ray CPUs that each router reserves."""
    max_body_bytes: int = 64 << 20
    """Longest HTTP request body, and longest gRPC message that a client sends."""
    max_images: int = 16
    """Per request."""
    max_video_frames: int = 256
    """Per request, in all its videos."""
    max_prompt_logprobs: int = 65_536
    """Of one answer: prompt tokens, each with its own logprob and those that were asked for beside it, times the choices that
    echo them."""
    max_image_pixels: int = 64_000_000
    """Per image or frame, read from its header before anything is decoded."""
    max_pictures_bytes: int = 1 << 30
    """Decoded pictures that all requests of a router may hold together; a request with pictures beyond it gets 429."""
    max_in_flight: int = 512
    """Requests that run at once."""
    max_in_flight_tokens: int = 0
    """Tokens that running requests may be expected to take together, by their prompts and what outputs were long so far; 0: no
    limit."""
    max_schema_bytes: int = 1 << 16
    """Longest schema or grammar of a request, as it is sent to workers."""
    schema_seconds: float = 2.0
    """Longest time to compile one; then the request gets 400."""
    max_waiting: int = 128
    """Requests that may wait for their turn; the next one gets 429, or takes the place of one with a worse priority."""
    max_waiting_seconds: float = 30.0
    """Longest wait for a turn; then the request gets 429."""
    keys_file: str = ""
    """TOML file with the API keys of clients and their limits (docs/security.md); empty: everybody may send requests."""
    open_metrics: bool = True
    """GET /metrics needs no API key."""
    breaker_failures: int = 5
    """Faults of a replica in a row after which it gets no requests while there are others; 0: any number."""
    breaker_seconds: float = 10.0
    """How long; one request tries the replica then."""
    request_timeout_seconds: float = 600.0
    """Deadline of a request that names none."""
    max_resumes: int = 3
    """How often a choice of a request may lose its replicas and go on elsewhere; preemptions do not count."""
    resume_wait_seconds: float = 60.0
    """How long a request that lost its replicas waits for others to come."""
    unread_bytes: int = 1 << 20
    """Output that a slow client may leave unread before its request is cancelled."""
    worker_silence_seconds: float = 10.0
    """A worker that says nothing for so long is taken for stuck: its requests fail, and it gets no more until it answers."""
    drain_seconds: float = 30.0
    """How long running requests may go on after a stop was asked for."""
    fetch: FetchConfig = field(default_factory=FetchConfig)
    """A section of its own."""
    grpc: GrpcConfig = field(default_factory=GrpcConfig)
    """`[router.grpc]`."""
    policy: str = "auto"
    """How replicas are chosen: `auto`, `round_robin`, `least_load` or `prefix` (docs/routing.md)."""
    empty_prefill_pool: str = "fail"
    """Without any prefill replica, requests `fail` with 503, or those without pictures are computed by decode: `local`."""
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    """A section of its own."""

    @property
    def grpc_port(self) -> int:
        """Where gRPC listens, 0: any free port."""
        return self.grpc.port if self.grpc.port >= 0 else self.port + 1000 if 0 < self.port < 64536 else 0


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """[ray]: where processes are placed."""

    address: str = ""
    """`host:port` of an existing cluster's head; empty: start a cluster here and end it with the deployment."""
    deployment: str = "slipstream"
    """Name of the deployment in a cluster that it joins. One `serve` at a time owns a name; when it was killed, the next one
    of the same name takes over the processes that serve."""
    cpus: float = 0.0
    """CPUs that a cluster started here offers; 0: as many as the deployment asks for, also when it is scaled."""
    max_processes: int = 64
    """Most processes of a deployment on a cluster that is started here: memory is not counted, and `scale` may ask for many."""
    placement_seconds: float = 8.0
    """Longest wait for room; raise it where nodes join on demand."""
    start_seconds: float = 300.0
    """Longest wait for every process to be ready."""
    unresponsive_seconds: float = 20.0
    """A process that answers no probe for so long is killed and started again."""
    metrics_listen: str = "auto"
    """`host:port` where the supervisor answers GET /metrics; "auto": any free port, on loopback or, in a joined cluster, at
    this node's address; empty: nowhere."""
    log_dir: str = ""
    """Folder of the processes' logs; empty: one in the system's temporary folder, removed after a clean end."""


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """[debug]: switches for finding faults; all are off by default."""

    record_dir: str = ""
    """Folder in which each router records every request with its prompt and output tokens, so that it can be reproduced;
    empty: nothing is recorded."""
    record_bytes: int = 64 << 20
    """Bound of one router's record; the oldest requests go first."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole of a deployment's configuration file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    pools: dict[str, PoolConfig] = field(
        default_factory=lambda: {"prefill": PoolConfig(role=Role.PREFILL), "decode": PoolConfig(role=Role.DECODE)}
    )
    transfer: TransferConfig = field(default_factory=TransferConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)


def hub_cache() -> Path:
    """Where the hub's tools keep what was downloaded; they and we read HF_HUB_CACHE and HF_HOME."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")


def user_cache() -> Path:
    """Ours in the user's cache folder, which XDG_CACHE_HOME names."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"


def ray_job_stop_seconds() -> float | None:
    """How long `ray job stop` gives us to end before it kills us; None: this process was not started by a Ray job."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:
        return None
    return float(os.environ.get("RAY_JOB_STOP_WAIT_TIME_S") or 3)


def load(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and apply `section.key=value` overrides (values are TOML; a bare word is a string).

    Raises ConfigError naming the file and key; an unknown key comes with the closest known one.
    """
    data: dict[str, Any] = {}
    where = "the overrides"
    if path is not None:
        where = str(path)
        try:
            data = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
    data.setdefault("pools", {role.value: {"role": role.value} for role in Role})
    if overrides:
        typed.build(Config, data, "", where)  # what is wrong in the file is blamed on the file, the rest on the overrides
        where = "the overrides"
    for override in overrides:
        typed.assign(data, override)
    config: Config = typed.build(Config, data, "", where)
    config_rules.check(config)
    return config


def from_dict(data: Mapping[str, Any]) -> Config:
    """The inverse of `to_dict`, with the same checks as `load`."""
    config: Config = typed.build(Config, data, "", "the configuration")
    config_rules.check(config)
    return config


def scaled(config: Config, replicas: Mapping[str, int]) -> Config:
    """`config` with other numbers of replicas by pool. Raises ConfigError, as `load` does."""
    if unknown := replicas.keys() - config.pools.keys():
        raise ConfigError(f"there is no pool {min(unknown)!r}; pools: {', '.join(config.pools)}", field="pools")
    pools = {name: dataclasses.replace(pool, replicas=replicas.get(name, pool.replicas)) for name, pool in config.pools.items()}
    result = dataclasses.replace(config, pools=pools)
    config_rules.check(result)
    return result


def to_dict(config: Config) -> dict[str, Any]:
    """Plain JSON-able values: how a supervisor hands the configuration to the processes it starts."""

    def plain(value: Any) -> Any:
        if isinstance(value, Role):
            return value.value
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return value

    result: dict[str, Any] = plain(dataclasses.asdict(config))
    return result
