"""Real worker processes without Ray, and just enough of a router to ask them: token ids in, times of tokens out."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.child import ChildProcess
from slipstream.errors import TransferError
from slipstream.rpc.channel import connect
from slipstream.v1 import worker_pb2 as pb
from slipstream.v1 import worker_pb2_grpc

READY_SECONDS = 120.0


@contextmanager
def replica(role: str, folder: Path, *, stages: int = 1, overrides: Sequence[str] = ()) -> Iterator[str]:
    """One replica of so many pipeline stages, one thread each; the address of its rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        master = f"127.0.0.1:{server.getsockname()[1]}"
    wanted = (f"pools.{role}.role={role}", f"pools.{role}.pp={stages}", *overrides)
    settings = [part for one in wanted for part in ("--set", one)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    ranks = [ChildProcess(f"{role}-{rank}", [
        sys.executable, "-m", role, *settings, "--replica-id", role, "--listen", "127.0.0.1:0", "--exit-with-parent",
        "--log-level", "warning", *(["--rank", str(rank), "--world", str(stages), "--master", master] if stages > 1 else [])],
        env, folder / f"{role}-{uuid.uuid4().hex}.log") for rank in range(stages)]
    try:
        ready = [rank.ready(READY_SECONDS) for rank in ranks]
        yield ready[0]["address"]
    finally:
        for rank in ranks:
            rank.stop(10.0)


@dataclass
class Leg:
    """What a worker said of one request."""

    tokens: list[tuple[int, float]] = field(default_factory=list)
    """(index, seconds on this machine's monotonic clock)."""
    end: pb.Finished | pb.Failed | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, *, tokens: int = 0, ended: bool = False, seconds: float = 120.0) -> None:
        """Raises TransferError for a request that failed or took longer."""
        try:
            async with asyncio.timeout(seconds):
                while len(self.tokens) < tokens or (ended and self.end is None):
                    if isinstance(self.end, pb.Failed):
                        raise TransferError(f"a worker failed: {self.end.message}")
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError as error:
            raise TransferError(f"{len(self.tokens)} of {tokens} tokens came in {seconds} s") from error


class Session:
    """One router's Session with one worker."""

    def __init__(self, address: str) -> None:
        self._channel = connect(address)
        self.stub: Any = worker_pb2_grpc.WorkerStub(self._channel)
        self._legs: dict[int, Leg] = {}

    async def __aenter__(self) -> Session:
        self.info = await self.stub.GetInfo(pb.GetInfoRequest(), timeout=20, wait_for_ready=True)
        self._call = self.stub.Session()
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()

    async def submit(self, submit: pb.Submit) -> Leg:
        """Ask."""
        leg = self._legs[submit.handle] = Leg()
        await self._call.write(pb.RouterMessage(submit=submit))
        return leg

    async def _read(self) -> None:
        async for message in self._call:
            if message.WhichOneof("message") != "step":
                continue
            report, now = message.step, time.monotonic()
            for handle, index in zip(report.handle, report.index, strict=True):
                self._legs[handle].tokens.append((index, now))
                self._legs[handle].news.set()
            for end in (*report.finished, *report.failed):
                self._legs[end.handle].end = end
                self._legs[end.handle].news.set()


def asking(handle: int, tokens: Sequence[int], max_tokens: int) -> pb.Submit:
    """Greedy, of just so many tokens, found in no cache."""
    return pb.Submit(handle=handle, request_id=f"bench-{handle}", transfer_id=uuid.uuid4().hex, tokens=tokens,
                     max_tokens=max_tokens, ignore_eos=True, remaining_ms=300_000, cache_salt=uuid.uuid4().hex,
                     sampling=pb.Sampling(top_p=1.0, repetition_penalty=1.0))
