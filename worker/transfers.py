"""What a replica tells of its Transfer streams in flight: each rank tells its own, rank 0 those of all. Knows no engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from cache_transfer.record import StreamRecord
from cache_transfer.transfers import Transfers
from slipstream.rpc.channel import connect
from slipstream.rpc.security import OPEN, Security
from slipstream.v1 import worker_pb2 as pb
from slipstream.v1 import worker_pb2_grpc

ASK_SECONDS = 1.0
"""Longest wait for another rank: less than a router waits for rank 0."""


def serve_rank(server: grpc.aio.Server, transfers: Transfers) -> None:
    """Another rank than rank 0 has of the Worker service Inspect alone, of its transfers alone."""
    async def inspect(request: pb.InspectRequest, context: Any) -> pb.InspectReply:
        return pb.InspectReply(transfers=told(transfers))

    handler: grpc.RpcMethodHandler[pb.InspectRequest, pb.InspectReply] = grpc.unary_unary_rpc_method_handler(
        inspect, request_deserializer=pb.InspectRequest.FromString, response_serializer=pb.InspectReply.SerializeToString)
    name = pb.DESCRIPTOR.services_by_name["Worker"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Inspect": handler}),))


class RankTransfers:
    """Rank 0's."""

    def __init__(self, transfers: Transfers, security: Security = OPEN) -> None:
        self._transfers = transfers
        self._security = security

    async def of_all(self, others: Sequence[str]) -> pb.InspectReply:
        """And those of the ranks at the addresses `others`; one that does not answer is named."""
        reply = pb.InspectReply(transfers=told(self._transfers))
        for one in await asyncio.gather(*(self._ask(address, rank) for rank, address in enumerate(others, 1))):
            reply.MergeFrom(one)
        return reply

    async def _ask(self, address: str, rank: int) -> pb.InspectReply:
        async with connect(address, self._security) as channel:
            try:
                stub = worker_pb2_grpc.WorkerStub(channel)
                return await stub.Inspect(pb.InspectRequest(only_transfers=True), timeout=ASK_SECONDS)
            except grpc.aio.AioRpcError as error:
                return pb.InspectReply(silent_ranks=[f"rank {rank} does not tell its transfers: {error.code().name}"])


def told(transfers: Transfers) -> list[pb.Transfer]:
    """All of one rank."""
    now = time.monotonic()
    return [_to_pb(record, now) for record in transfers]


def _to_pb(record: StreamRecord, now: float) -> pb.Transfer:
    return pb.Transfer(
        request_id=record.request_id, transfer_id=record.transfer_id, attempt=record.attempt, side=record.side,
        rank=record.rank, peer=record.peer, peer_rank=record.peer_rank, channel=record.channel, phase=record.phase,
        age_seconds=now - record.opened, kv_bytes=record.kv_bytes, state_bytes=record.state_bytes,
        total_bytes=record.total_bytes)
