"""What a configuration may say beyond what its types do; knows no file."""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from slipstream import typed
from slipstream.config_routing import AT_LEAST_0, EMPTY_POOL, POLICIES
from slipstream.errors import ConfigError
from slipstream.types import Role

NAMES = {"transfer.channel": ("auto", "local", "rdma", "grpc"), "transfer.rdma.engine": ("auto", "nixl", "mooncake"),
         "engine.kv_dtype": ("auto", "fp8_e4m3"), "engine.state_dtype": ("float32", "bfloat16"), "router.policy": POLICIES,
         "router.empty_prefill_pool": EMPTY_POOL}
"""What keys may say that choose one of several by its name."""

_LABEL = re.compile(r"!?(?:in\([\w.-]+(?: *, *[\w.-]+)*\)|[\w.-]+)")

_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("at least 1", lambda value: value >= 1,
     "engine.block_size engine.kv_cache_tokens engine.max_running engine.max_batch_tokens engine.threads engine.growth_tokens "
     "transfer.frame_bytes router.max_in_flight router.max_video_frames debug.record_bytes "
     "router.fetch.max_bytes router.fetch.concurrent"),
    ("at least 0", lambda value: value >= 0,
     "engine.state_snapshots transfer.image_store_bytes transfer.rdma.quarantine_seconds transfer.faults.delay_seconds "
     "transfer.faults.stall_at_bytes transfer.faults.bytes_per_second router.max_in_flight_tokens router.max_waiting "
     "router.breaker_failures router.fetch.max_redirects " + AT_LEAST_0),
    ("above 0", lambda value: value > 0,
     "transfer.stall_seconds transfer.lease_seconds transfer.connect_seconds ray.unresponsive_seconds "
     "router.routing.dns_seconds router.routing.load_seconds router.fetch.seconds router.fetch.total_seconds "
     "router.schema_seconds router.max_waiting_seconds router.breaker_seconds"),
    ("in (0, 1]", lambda value: 0 < value <= 1, "transfer.parked_fraction"),
    ("a share, 0 to 1", lambda value: 0 <= value <= 1,
     "transfer.faults.drop transfer.faults.duplicate transfer.faults.corrupt transfer.faults.cut"),
    ("0 to 1000000", lambda value: 0 <= value <= 1_000_000, "router.max_prompt_logprobs"),  # they travel in one message
    ("0 to 3", lambda value: 0 <= value <= 3, "speculative.tokens"),
    ("0 to 65535", lambda value: 0 <= value < 65536, "router.port"),
    ("-1 to 65535", lambda value: -1 <= value < 65536, "router.grpc.port"),
)
"""What is allowed, the test of it, and the keys."""


def check(config: Any) -> None:
    """Raise ConfigError, naming the key, for what a type cannot say."""
    for role in Role:
        if not any(pool.role is role and pool.replicas > 0 for pool in config.pools.values()):
            if own := [name for name, pool in config.pools.items() if pool.role is role]:
                raise ConfigError(f"pools.{own[0]}.replicas: a deployment needs a {role.value} replica, at least one",
                                  field=f"pools.{own[0]}.replicas")
            raise ConfigError(f"no pool has role {role.value}; add one: [pools.{role.value}] role = \"{role.value}\"",
                              field="pools")
    for name, pool in config.pools.items():
        for key, least in {"replicas": 0, "tp": 1, "pp": 1, "cpus": 0.0001, "gpus": 0}.items():
            if getattr(pool, key) < least:
                raise ConfigError(f"pools.{name}.{key} must be at least {least}, not {getattr(pool, key):g}",
                                  field=f"pools.{name}.{key}")
        for label, selector in pool.labels.items():
            if not _LABEL.fullmatch(selector):
                raise ConfigError(f"pools.{name}.labels.{label}: {selector!r} selects no label; write \"a\", \"!a\", "
                                  "\"in(a,b)\" or \"!in(a,b)\"", field=f"pools.{name}.labels.{label}")
        if doubled := {"CPU", "GPU"} & pool.resources.keys():
            field_name = f"pools.{name}.resources"
            raise ConfigError(f"{field_name}: {min(doubled)} is reserved with cpus and gpus", field=field_name)
        if name == "router" or not re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name):
            raise ConfigError(f"pools.{name}: a pool's name is made of a-z, 0-9 and inner dashes, and is not `router`; "
                              "its replicas are called NAME-0, NAME-1 and so on", field="pools")
    for allowed, holds, paths in _RANGES:
        for path in paths.split():
            if not holds(value := attrgetter(path)(config)):
                raise ConfigError(f"{path} must be {allowed}, not {value:g}", field=path)
    for path, known in NAMES.items():
        typed.check_name(attrgetter(path)(config), known, path)
    if (frame_bytes := config.transfer.frame_bytes) > 32 << 20:
        raise ConfigError(f"transfer.frame_bytes must be at most 32 MiB, half of the longest message, not {frame_bytes}",
                          field="transfer.frame_bytes")
    if (running := config.engine.max_running) > (tokens := config.engine.max_batch_tokens):
        raise ConfigError(f"engine.max_running ({running}) must not exceed engine.max_batch_tokens ({tokens}): every running "
                          "sequence decodes one token a step", field="engine.max_running")
    if "://" in (address := config.ray.address):
        raise ConfigError(f"ray.address must be host:port of the cluster's head, not {address!r}", field="ray.address")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", config.ray.deployment):
        raise ConfigError(f"ray.deployment must be made of letters, digits, - and _, not {config.ray.deployment!r}",
                          field="ray.deployment")
