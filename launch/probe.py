"""Asks a process whether it serves. Knows neither Ray nor what becomes of one that does not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import Enum
from http.client import HTTPException
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from launch import client
from slipstream.errors import SlipstreamError
from slipstream.rpc.channel import connect
from slipstream.rpc.security import OPEN, Security
from slipstream.v1 import worker_pb2, worker_pb2_grpc

STRIKES = 4
"""A process is given up at this count."""


class Finding(Enum):
    """What one probe found; its value is what that adds to the count."""

    FINE = 0
    SILENT = 1
    WRONG = 2
    """It says itself that it does not serve. Twice in a row, since a drain begins by saying so."""


def count(strikes: int, finding: Finding) -> int:
    """The count after `finding`: whoever is fine starts from nothing."""
    return strikes + finding.value if finding is not Finding.FINE else 0


async def worker(address: str, timeout_seconds: float, security: Security = OPEN) -> Finding:
    """Ask a worker's health service. One that is draining is fine."""
    async with connect(address, security) as channel:
        try:
            said = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_seconds)
            if said.status == health_pb2.HealthCheckResponse.SERVING:
                return Finding.FINE
            info = await worker_pb2_grpc.WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=timeout_seconds)
        except grpc.aio.AioRpcError:
            return Finding.SILENT
    return Finding.FINE if info.draining else Finding.WRONG


async def router(http: str, timeout_seconds: float) -> Finding:
    """Ask a router's /live."""
    try:
        await asyncio.to_thread(client.get, http, "/live", timeout_seconds)
    except (SlipstreamError, OSError, HTTPException, ValueError):
        return Finding.SILENT
    return Finding.FINE


async def process(ready: Mapping[str, Any], timeout_seconds: float, security: Security = OPEN) -> Finding:
    """Ask whoever printed this ready line."""
    if "http" in ready:
        return await router(ready["http"], timeout_seconds)
    return await worker(ready["address"], timeout_seconds, security)
