"""A prefill engine with its CacheStore in a process of its own, told what to compute by lines of JSON on stdin.

{"serve": RATE} -> {"address"}: a store whose link carries RATE bytes a second. {"prompt": TOKENS, "id": I, "rate": RATE}:
compute and publish; without a rate: compute alone. Both answer with monotonic times: submitted, layers_end, first_token.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from bench.overlap import engine_config, layout_of, memory_of
from cache_transfer.handoff import Handoff, HandoffChoice
from cache_transfer.memory import tune_allocator
from cache_transfer.paths import open_paths
from cache_transfer.source import SourceTransfer
from cache_transfer.store import CacheStore
from slipstream import checkpoint as checkpoints
from slipstream.config import FaultsConfig, ModelConfig, TransferConfig
from slipstream.engine import build
from slipstream.engine.engine import Engine, GenerationRequest, StepResult
from slipstream.engine.loop import EngineLoop
from slipstream.errors import SlipstreamError
from slipstream.rpc.server import listen, new_server
from slipstream.types import RequestId, SamplingParams, StopParams


class _Watched:
    """A Publisher that notes when the last layer was done."""

    def __init__(self, inner: SourceTransfer | None) -> None:
        self._inner = inner
        self.layers_end = 0.0

    def begin(self, cached_tokens: int) -> None:
        if self._inner:
            self._inner.begin(cached_tokens)

    def allocated(self, blocks: tuple[int, ...], state_slot: int | None, cached_tokens: int) -> None:
        if self._inner:
            self._inner.allocated(blocks, state_slot, cached_tokens)

    def layer_done(self, layer: int, num_tokens: int, last_chunk: bool) -> None:
        if self._inner:
            self._inner.layer_done(layer, num_tokens, last_chunk)
        if last_chunk:
            self.layers_end = time.monotonic()


class Producer:
    """One engine and its stores."""

    def __init__(self, folder: Path) -> None:
        self._checkpoint = checkpoints.read(folder)
        engine = build.build(self._checkpoint, ModelConfig(dtype="float32", device="cpu"), engine_config())
        self._memory = memory_of(layout_of(self._checkpoint), engine.caches)
        self._first: dict[RequestId, Future[tuple[float, int]]] = {}
        self._stores: dict[float, CacheStore] = {}
        self._servers: list[Any] = []
        self._loop = EngineLoop(engine, self._stepped, lambda error: os._exit(1))
        self._loop.start()

    def _stepped(self, result: StepResult) -> None:
        for event in result.events:
            self._first[event.request].set_result((time.monotonic(), event.token))
        for id, error in result.failures:
            self._first[id].set_exception(error)

    async def serve(self, rate: float) -> dict[str, Any]:
        """A store with a link of so many bytes a second."""
        config = TransferConfig(channel="grpc", faults=FaultsConfig(bytes_per_second=rate))
        self._stores[rate] = CacheStore(self._memory, open_paths(config, self._memory.extent, process="p"), replica_id="p0",
                                        epoch=1, rank=0, config=config)
        server = new_server()
        self._stores[rate].add_to(server)
        self._servers.append(server)
        return {"address": await listen(server, "127.0.0.1:0")}

    async def prompt(self, tokens: int, name: str, rate: float | None) -> dict[str, Any]:
        """Compute one, and give its memory back when it is over."""
        id = RequestId(name=name)
        request = GenerationRequest(id=id, tokens=tuple((i * 7919 + len(name)) % 500 for i in range(tokens)),
                                    sampling=SamplingParams(), stop=StopParams(max_tokens=4, ignore_eos=True), cache_salt=name)
        over = asyncio.Event()
        transfer = None if rate is None else self._stores[rate].expect(name, id, tokens, _Over(over))
        watched = _Watched(transfer)
        self._first[id] = Future()
        if transfer:
            await asyncio.sleep(0.3)  # for the destination to be there: it is the wire that is measured, not the greeting
        submitted = time.monotonic()
        await asyncio.wrap_future(self._loop.call(lambda engine: engine.submit(request, (), watched)))
        first, token = await asyncio.wrap_future(self._first[id])
        if transfer:
            mrope = await asyncio.wrap_future(self._loop.call(lambda engine: engine.mrope(id)))
            transfer.finish(Handoff(request_id=name, prompt_tokens=tokens, state_token_count=tokens, mrope=mrope,
                                    choices=(HandoffChoice(first_token=token),)))
            await over.wait()
        await asyncio.wrap_future(self._loop.call(lambda engine: _release(engine, id)))
        return {"submitted": submitted, "layers_end": watched.layers_end, "first_token": first}


def _release(engine: Engine, id: RequestId) -> None:
    engine.release(id)


class _Over:
    def __init__(self, over: asyncio.Event) -> None:
        self._over = over

    def ready(self) -> None: ...

    def parked(self, reason: str) -> None:
        print(f"parked: {reason}", file=sys.stderr)

    def done(self, committed: bool) -> None:
        self._over.set()

    def failed(self, error: SlipstreamError) -> None:
        print(f"failed: {error}", file=sys.stderr)
        self._over.set()


async def main(folder: Path) -> None:
    """Until stdin ends."""
    tune_allocator()
    producer = Producer(folder)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        command = json.loads(line)
        answer = (await producer.serve(command["serve"]) if "serve" in command
                  else await producer.prompt(command["prompt"], command["id"], command.get("rate")))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
