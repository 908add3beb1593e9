"""Engines that write into another process's memory, one per file; they are chosen by name, once, at start."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cache_transfer.channels.engines.base import Engine
from cache_transfer.channels.engines.mooncake import MooncakeEngine
from cache_transfer.channels.engines.nixl import NixlEngine
from slipstream.errors import ConfigError, TransferError

logger = logging.getLogger(__name__)

FIELD = "transfer.rdma.engine"
KNOWN: dict[str, Callable[..., Engine]] = {"nixl": NixlEngine, "mooncake": MooncakeEngine}
"""In the order in which `auto` tries them."""
HOW_TO_INSTALL = ("pip install 'slipstream[rdma]' brings NIXL for CPU memory and NVIDIA GPUs (not the package `nixl`, "
                  "which pulls CUDA builds of torch); on AMD GPUs pip install mooncake-transfer-engine-rocm, or build NIXL;"
                  " Mooncake also needs the system's libibverbs1")


def choose_engine(name: str, *, host: str, process: str, lands: bool = True) -> Engine:
    """Load and start an engine: `auto` takes the first that runs here.

    `host`: the address that peers reach this process by. `process`: its name among them, the same after a restart. `lands`:
    peers write into it too. Call `environment.set_environment` before. Raises ConfigError if none runs.
    """
    reasons = []
    for one in KNOWN if name == "auto" else (name,):
        try:
            engine = KNOWN[one](host=host, process=process, lands=lands)
        except (ImportError, TransferError) as error:
            reasons.append(f"{one}: {error}")
            continue
        logger.info("one-sided writes by %s%s", one, f" ({'; '.join(reasons)})" if reasons else "")
        return engine
    raise ConfigError(f"{FIELD}={name}: {'; '.join(reasons)}. {HOW_TO_INSTALL}", field=FIELD)
