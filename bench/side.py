"""One of the two processes of a pair, told what to do by lines of JSON on stdin; answers each with one line.

{"open": NAME, "way": W, "transfer": {...}}, at the destination with "address"; {"offer": NAME, "job": [...], "id": I};
{"move": NAME, "job": [...], "id": I, "source_pid": P}.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from bench.harness import cpu_clock
from bench.movers import MOVERS, Memcpy
from bench.pool import Job, Pool
from cache_transfer.memory import tune_allocator


class Side:
    """Its pool and its half of each mover."""

    def __init__(self, role: str, blocks: int, layers: int) -> None:
        self._role = role
        self._pool = Pool(blocks, layers)
        self._movers: dict[str, Any] = {}
        self._filled: Job | None = None

    async def do(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command."""
        if name := command.get("open"):
            mover = self._movers[name] = MOVERS[command["way"]](self._pool, command.get("transfer", {}))
            if self._role == "source":
                return {"address": await mover.listen(), "pid": os.getpid()}
            await mover.connect(command["address"])
            return {}
        job = Job(*command["job"])
        if name := command.get("offer"):
            if self._filled != job:
                self._pool.fill(job.table("source"))
                self._filled = job
            await self._movers[name].offer(job, command["id"])
            return {}
        return await self._move(self._movers[command["move"]], job, command["id"], command["source_pid"])

    async def _move(self, mover: Any, job: Job, name: str, source_pid: int) -> dict[str, Any]:
        self._pool.clear()
        if isinstance(mover, Memcpy):
            mover.prepare(job)
        there, cpu, began = cpu_clock(source_pid), time.process_time(), time.perf_counter()
        await mover.move(job, name)
        seconds = time.perf_counter() - began
        cpu, there = time.process_time() - cpu, cpu_clock(source_pid) - there
        return {"seconds": seconds, "cpu_seconds": cpu + there, "source_cpu_seconds": there,
                "wrong": self._pool.wrong(job.table("destination"))}


async def main(role: str, blocks: int, layers: int) -> None:
    """Until stdin ends."""
    tune_allocator()
    side = Side(role, blocks, layers)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        try:
            answer = await side.do(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    os._exit(0)  # engines and gRPC have threads that end with the process


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
