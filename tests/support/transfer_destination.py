"""A destination rank in a process of its own, so that a test can stop or kill it: loads one transfer and says "loaded"."""

from __future__ import annotations

import asyncio
import json
import sys

from cache_transfer.load import CacheLoader
from cache_transfer.paths import open_paths
from cache_transfer.regions import Landing
from slipstream.config import TransferConfig
from tests.support import transfer_rig


async def main(address: str, name: str, blocks: list[int], slot: int, seconds: float = 60.0, **rank: object) -> None:
    memory, _ = transfer_rig.destination(transfer_rig.layout(), transfer_rig.rank_of(rank))
    config = TransferConfig(channel="grpc")
    loader = CacheLoader(memory, open_paths(config, memory.extent, process="d1"), replica_id="d1", epoch=1,
                         rank=memory.shard.rank, config=config)

    async def admit(num_tokens: int) -> Landing:
        return Landing(blocks=tuple(blocks), state_slot=slot)

    loaded = await loader.load([address], transfer_id=name, attempt=0, source_epoch=1, request_id="r",
                               remaining_seconds=seconds, admit=admit)
    await loaded.close(committed=True)
    await loader.close()
    print("loaded", flush=True)


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
