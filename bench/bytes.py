"""Suite `bytes`: what a transfer puts on the wire, counted below gRPC, against its state's size; no picture to decode."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from bench import families, workers
from bench.harness import Result, Row
from bench.relay import Relay
from cache_transfer.channels.grpc import InlineChannel
from cache_transfer.handoff import Handoff, HandoffChoice
from cache_transfer.layout import CacheLayout
from cache_transfer.load import CacheLoader
from cache_transfer.memory import CacheMemory
from cache_transfer.paths import Paths
from cache_transfer.regions import Landing
from cache_transfer.spans import Spans
from cache_transfer.store import CacheStore
from slipstream import checkpoint as checkpoints
from slipstream.block_hash import content_hash
from slipstream.checkpoint import DEMO, Checkpoint
from slipstream.config import EngineConfig, TransferConfig
from slipstream.engine.caches import allocate
from slipstream.errors import SlipstreamError, TransferError
from slipstream.models import registry
from slipstream.rpc import convert
from slipstream.rpc.server import listen, new_server
from slipstream.types import Grid, MropeState, RequestId
from slipstream.v1 import worker_pb2 as pb
from worker.replica import cache_tensors

TOKENS = 8192


def run(quick: bool) -> Result:
    """`quick`: without the worker processes that show where a picture goes."""
    rows = [asyncio.run(_family(architecture)) for architecture in registry.architectures()]
    ratios = {f"wire/necessary {row['model']}": float(row["wire_bytes"]) / float(row["necessary_bytes"]) for row in rows}
    if not quick:
        row = _picture()
        rows.append(row)
        ratios["wire/necessary a picture, worker processes"] = float(row["wire_bytes"]) / float(row["necessary_bytes"])
        ratios["image bytes to decode/image bytes"] = float(row["image_bytes_to_decode"]) / float(row["image_bytes"])
    return Result(name="bytes", rows=rows, ratios=ratios)


class _Counting(InlineChannel):
    landed = 0

    def land(self, origin: bytes, payload: memoryview, target: Spans) -> None:
        super().land(origin, payload, target)
        self.landed += len(payload)


class _Listener:
    def ready(self) -> None: ...

    def parked(self, reason: str) -> None: ...

    def done(self, committed: bool) -> None: ...

    def failed(self, error: SlipstreamError) -> None:
        raise error


def _layout(checkpoint: Checkpoint) -> CacheLayout:
    return CacheLayout(model_name="bench", weights_revision="none", layers=checkpoint.layers, block_size=16,
                       kv_dtype="float32", conv_dtype="float32")


def _memory(checkpoint: Checkpoint, fill: bool) -> CacheMemory:
    config = EngineConfig(kv_cache_tokens=TOKENS)
    caches = allocate(checkpoint.layers, config, 2, torch.float32, torch.device("cpu"))
    tensors = cache_tensors(checkpoint, caches, None)
    for tensor in tensors.values() if fill else ():
        tensor.normal_()
    return CacheMemory(_layout(checkpoint), tensors)


async def _family(architecture: str) -> Row:
    """Store and loader with checksums, as configured by default, on both sides of a relay."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = families.configured(architecture, Path(folder))
    config, channel, server = TransferConfig(), _Counting(), new_server()
    store = CacheStore(_memory(checkpoint, True), Paths([InlineChannel()]), replica_id="p0", epoch=1, rank=0, config=config)
    store.add_to(server)
    loader = CacheLoader(_memory(checkpoint, False), Paths([channel]), replica_id="d0", epoch=1, rank=0, config=config)
    blocks = tuple(np.random.default_rng(1).permutation(TOKENS // 16).tolist())
    async with Relay(await listen(server, "127.0.0.1:0")) as relay:
        transfer = store.expect("t", RequestId(name="r"), TOKENS, _Listener())
        transfer.begin(0)
        transfer.allocated(blocks, 1, 0)
        for layer in range(len(checkpoint.layers)):
            transfer.layer_done(layer, TOKENS, True)
        transfer.finish(Handoff(request_id="r", prompt_tokens=TOKENS, state_token_count=TOKENS,
                                choices=(HandoffChoice(first_token=1),), mrope=MropeState(delta=0, last_position=(0, 0, 0))))

        async def admit(num_tokens: int) -> Landing:
            return Landing(blocks=blocks[::-1], state_slot=0)

        loaded = await loader.load([relay.address], transfer_id="t", attempt=0, source_epoch=1, request_id="r",
                                   remaining_seconds=60.0, admit=admit)
        await loaded.close(committed=True)
        await loader.close()
        await server.stop(None)
    necessary = sum(_layout(checkpoint).bytes_necessary(TOKENS))
    return {"model": architecture, "tokens": TOKENS, "necessary_bytes": necessary, "payload_bytes": channel.landed,
            "wire_bytes": relay.to_target + relay.from_target}


def _picture() -> Row:
    """The demo model in real processes: a picture goes to prefill, and all that decode is told is searched for it."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        prefill, decode = (stack.enter_context(workers.replica(role, Path(name), overrides=("transfer.channel=grpc",)))
                           for role in ("prefill", "decode"))
        return asyncio.run(_ask_with_picture(prefill, decode))


async def _ask_with_picture(prefill: str, decode: str) -> Row:
    checkpoint = checkpoints.read(DEMO)
    pixels = np.random.default_rng(3).integers(0, 256, (320, 320, 3), dtype=np.uint8)
    data = pixels.tobytes()
    async with (Relay(prefill, keep=True) as to_source, Relay(decode, keep=True) as to_decode,
                workers.Session(prefill) as first, workers.Session(to_decode.address) as second):
        await _put(first, pixels)
        grid = Grid(t=1, h=20, w=20)
        vision = [checkpoint.vision_start_token_id, *[checkpoint.image_token_id] * (grid.h * grid.w // 4),
                  checkpoint.vision_end_token_id]
        tokens = [token for token in vision if token is not None] + [100 + i % 1000 for i in range(3000)]
        to_prefill = workers.asking(1, tokens, 4)
        to_prefill.images.append(convert.image_to_pb(content_hash(320, 320, data), grid))
        asked = pb.Submit()
        asked.CopyFrom(to_prefill)
        asked.prefill_addresses[:] = [to_source.address]
        asked.prefill_epoch = first.info.epoch
        legs = await first.submit(to_prefill), await second.submit(asked)
        await legs[1].until(ended=True)
        if not isinstance(legs[1].end, pb.Finished):
            raise TransferError(f"decode ended with {legs[1].end}")
        stats = legs[1].end.stats
    necessary = sum(_layout(checkpoint).bytes_necessary(len(tokens)))
    seen = _found(data, (bytes(to_source.kept[1]), bytes(to_decode.kept[0])))
    return {"model": "demo, with a picture", "tokens": len(tokens), "necessary_bytes": necessary,
            "payload_bytes": stats.kv_bytes + stats.state_bytes, "image_bytes": len(data), "image_bytes_to_decode": seen,
            "wire_bytes": to_source.from_target + to_source.to_target}


async def _put(session: workers.Session, pixels: np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]) -> None:
    data = pixels.tobytes()

    async def chunks() -> object:
        yield pb.ImageChunk(content_hash=content_hash(*pixels.shape[:2], data), height=pixels.shape[0], width=pixels.shape[1])
        yield pb.ImageChunk(data=data)

    await session.stub.PutImage(chunks(), timeout=20)


def _found(data: bytes, streams: Sequence[bytes]) -> int:
    """Bytes of `data` that are in the streams, looked for in pieces of 32."""
    return sum(32 for at in range(0, len(data) - 31, 32) if any(data[at : at + 32] in stream for stream in streams))
