"""A small hybrid layout with random contents, and a child process that serves it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch
from torch import Tensor

from cache_transfer.layout import CacheLayout, Kind, whole
from cache_transfer.memory import CacheMemory
from cache_transfer.regions import Landing
from slipstream.sharding import Geometry, Shard
from slipstream.types import AttentionLayer, LinearLayer

BLOCKS, SLOTS, BLOCK_SIZE = 64, 8, 4


def layout(dtype: str = "float32", *, weights: str = "w1") -> CacheLayout:
    linear = [LinearLayer(name=f"layers.{i}", key_heads=2, value_heads=4, key_head_size=8, value_head_size=8, conv_width=4)
              for i in (0, 1)]
    full = AttentionLayer(name="layers.2", kv_heads=2, head_size=16)
    return CacheLayout(model_name="rig", weights_revision=weights, layers=(*linear, full, AttentionLayer(
        name="layers.3", kv_heads=2, head_size=16)), block_size=BLOCK_SIZE, kv_dtype=dtype,
        conv_dtype="bfloat16" if dtype.startswith("float8") else dtype)


def tensors(of: CacheLayout, seed: int | None) -> dict[str, Tensor]:
    """Random contents for a source, zeros (seed None) for a destination."""
    generator = torch.Generator().manual_seed(seed or 0)
    dtype, conv_dtype = getattr(torch, of.kv_dtype), getattr(torch, of.conv_dtype)
    found: dict[str, Tensor] = {}
    for layer in of.layers:
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
        if isinstance(layer, AttentionLayer):
            shapes = {"kv": ((BLOCKS, layer.kv_heads, 2, of.block_size, layer.head_size), dtype)}
        else:
            shapes = {"conv": ((SLOTS, sum(layer.conv_segments), layer.conv_width - 1), conv_dtype),
                      "recurrent": ((SLOTS, layer.value_heads, layer.key_head_size, layer.value_head_size), torch.float32)}
        for kind, (shape, kind_dtype) in shapes.items():
            values = torch.randn(shape, generator=generator) if seed is not None else torch.zeros(shape)
            found[f"{layer.name}.{kind}"] = values.to(kind_dtype)
    return found


def cut(of: CacheLayout, held: dict[str, Tensor], shard: Shard) -> dict[str, Tensor]:
    """A rank's part of whole tensors: heads that are fewer than ranks stand on neighbours, others are cut evenly."""
    def part(tensor: Tensor, dim: int, heads: int) -> Tensor:
        copies = max(1, shard.tp // heads)
        by_head = tensor.reshape(*tensor.shape[:dim], heads, -1, *tensor.shape[dim + 1 :]).repeat_interleave(copies, dim)
        return by_head.chunk(shard.tp, dim)[shard.tp_rank].flatten(dim, dim + 1).contiguous()

    found: dict[str, Tensor] = {}
    for layer in (of.layers[number] for number in shard.layers):
        if isinstance(layer, AttentionLayer):
            found[f"{layer.name}.kv"] = part(held[f"{layer.name}.kv"], 1, layer.kv_heads)
            continue
        segments = torch.split(held[f"{layer.name}.conv"], list(layer.conv_segments), 1)
        heads = (layer.key_heads, layer.key_heads, layer.value_heads)
        found[f"{layer.name}.conv"] = torch.cat([part(*each) for each in zip(segments, (1, 1, 1), heads, strict=True)], 1)
        found[f"{layer.name}.recurrent"] = part(held[f"{layer.name}.recurrent"], 1, layer.value_heads)
    return found


def rows(of: CacheLayout, held: dict[str, Tensor], where: Landing, count: int) -> dict[str, Tensor]:
    """What a prompt of `count` tokens keeps, gathered by plain indexing: the oracle of the byte movers."""
    found: dict[str, Tensor] = {}
    for spec in of.tensors:
        tensor = held[spec.name]
        if spec.kind is Kind.KV:
            token = torch.arange(count)
            blocks = torch.tensor(where.blocks)[token // of.block_size]
            found[spec.name] = tensor[blocks, :, :, token % of.block_size]
        else:
            assert where.state_slot is not None
            found[spec.name] = tensor[where.state_slot]
    return found


class Source:
    """The child's two pipes."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address

    async def tell(self, **command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        await self.process.stdin.drain()

    async def hear(self, event: str) -> dict[str, object]:
        """The next line of this kind; lines of other kinds before it are passed over."""
        assert self.process.stdout is not None
        async with asyncio.timeout(20):
            while line := await self.process.stdout.readline():
                found: dict[str, object] = json.loads(line)
                if found.get("event") == event:
                    return found
        raise AssertionError(f"the source ended before it said {event}")


@asynccontextmanager
async def source(**arguments: object) -> AsyncIterator[Source]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.transfer_child", json.dumps(arguments),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            first = json.loads(await process.stdout.readline())
        yield Source(process, first["address"])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def destination(of: CacheLayout, shard: Shard | None = None) -> tuple[CacheMemory, dict[str, Tensor]]:
    """Of one rank."""
    held = cut(of, tensors(of, None), shard or whole(of))
    return CacheMemory(of, held, shard), held


def rank_of(arguments: dict[str, object]) -> Shard | None:
    """The rank that a child process is told to be; None: the only one."""
    if "tp" not in arguments:
        return None
    return Shard(geometry=Geometry(tp=int(str(arguments["tp"])), stages=tuple(arguments["stages"])),  # type: ignore[arg-type]
                 rank=int(str(arguments["rank"])))
