"""`python -m router`: serve HTTP and gRPC until told to stop, then drain."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress

import uvicorn
import uvloop

from router.app import App
from router.inference import InferenceServer
from router.service import RouterService
from slipstream import process
from slipstream.config import Config
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.rpc import security
from slipstream.rpc.server import bound, join_address, split_address

logger = logging.getLogger(__name__)


def main() -> int:
    """Exit status: 0 after a drain, 2 for a wrong configuration."""
    parser = process.parser("router", __doc__ or "")
    parser.add_argument("--worker", action="append", default=[], metavar="HOST:PORT", help="a worker's address; repeatable")
    parser.add_argument("--directory", metavar="HOST:PORT", help="the supervisor's Directory, which lists the workers; "
                        'a line {"directory": "HOST:PORT"} on stdin names another one')
    parser.add_argument("--worker-dns", action="append", default=[], metavar="NAME:PORT",
                        help="a name whose every address is a worker's, such as a headless service; repeatable")
    parser.add_argument("--advertise", default="", metavar="HOST",
                        help="where a router that listens on every interface is reached")
    arguments = parser.parse_args()
    try:
        config = process.start(arguments, "router")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, arguments))
    except SlipstreamError as error:
        print(f"router: {error.message}", file=sys.stderr)
        return 2
    return 0


async def _serve(config: Config, arguments: argparse.Namespace) -> None:
    stop, trusted, for_clients = process.stop_event(), security.load(config.security), security.for_clients(config)
    listener = _listen(config.router.host, config.router.port)
    public = config.router.grpc.host, config.router.grpc_port
    bound(join_address(*public), "router.grpc.port").close()  # the same mistake, said as well
    service = RouterService(config, trusted)
    for address in arguments.worker:
        service.workers.add(address)
    for name in arguments.worker_dns:
        service.workers.resolve(name, config.router.routing.dns_seconds)
    if arguments.directory:
        service.workers.watch(arguments.directory)
    process.on_control(lambda told: service.workers.watch(told["directory"]))
    server = _Server(uvicorn.Config(App(service), loop="none", http="httptools", ws="none", lifespan="off",
                                    access_log=False, log_config=None, timeout_graceful_shutdown=5, server_header=False))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    calls = InferenceServer(service, for_clients)
    service.grpc_address = _reached(await calls.start(*public), arguments.advertise)
    http = _reached(join_address(*listener.getsockname()[:2]), arguments.advertise)
    process.announce(http=http, grpc=service.grpc_address, pid=os.getpid())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    logger.info("draining")
    await calls.drain()
    await service.drain()
    server.should_exit = True
    await asyncio.gather(serving, calls.stop())
    await service.close()


def _reached(address: str, advertise: str) -> str:
    """By which others reach what listens at `address`."""
    host, port = split_address(address)
    with suppress(ValueError):  # a name
        host = advertise if advertise and ipaddress.ip_address(host).is_unspecified else host
    return join_address(host, port)


class _Server(uvicorn.Server):
    """Leaves signals to `process.stop_event`, which drains first."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Captures none."""
        yield


def _listen(host: str, port: int) -> socket.socket:
    """Raises ConfigError naming the port when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {join_address(host, port)}: {error.strerror}; set router.port to another port, or "
                          "to 0 for any free one", field="router.port") from error
    listener.listen(1024)
    listener.setblocking(False)
    return listener


if __name__ == "__main__":
    sys.exit(main())
