"""A source rank in a process of its own: serves known random contents, driven by lines of JSON on stdin.

Commands: {"expect": id, "tokens": n, "blocks": [...], "slot": s, "cached": n, "chunks": [...], "finished": bool}, {"fail": id},
{"state": true}; `"begin": true`: nothing is computed. Every command is answered by one JSON line; events of transfers come as
lines too.
"""

from __future__ import annotations

import asyncio
import json
import sys

from cache_transfer.handoff import Handoff, HandoffChoice
from cache_transfer.layout import whole
from cache_transfer.memory import CacheMemory
from cache_transfer.paths import Paths, open_paths
from cache_transfer.source import SourceTransfer
from cache_transfer.store import CacheStore
from slipstream import typed
from slipstream.config import TransferConfig
from slipstream.errors import CancelledError, SlipstreamError
from slipstream.rpc.server import listen, new_server
from slipstream.types import MropeState, RequestId
from tests.support import transfer_rig


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


class Listener:
    def __init__(self, name: str) -> None:
        self.name = name

    def ready(self) -> None:
        say(event="ready", id=self.name)

    def parked(self, reason: str) -> None:
        say(event="parked", id=self.name)

    def done(self, committed: bool) -> None:
        say(event="done", id=self.name, committed=committed)

    def failed(self, error: SlipstreamError) -> None:
        say(event="failed", id=self.name, code=error.code)


def paths(arguments: dict[str, object], memory: CacheMemory) -> Paths:
    """The channels that the test names."""
    named = typed.build(TransferConfig, {"frame_bytes": 4096, **arguments.get("transfer", {})}, "transfer", "the test")  # type: ignore[dict-item]
    return open_paths(named, memory.extent, process=f"p{memory.shard.rank}", lands=False)


async def compute(transfer: SourceTransfer, command: dict[str, object], layers: int) -> None:
    """Publish as prefill would: layer by layer, chunk by chunk."""
    tokens, cached = command["tokens"], command.get("cached", 0)
    assert isinstance(tokens, int)
    assert isinstance(cached, int)
    chunks = command.get("chunks") or [tokens - cached]
    assert isinstance(chunks, list)
    transfer.begin(cached)
    transfer.allocated(tuple(command["blocks"]), command["slot"], cached)  # type: ignore[arg-type]
    if command.get("begin"):
        return
    end = cached
    for chunk in chunks:
        end += chunk
        for layer in range(layers):
            await asyncio.to_thread(transfer.layer_done, layer, end, end == tokens)
    handoff = Handoff(request_id="r", prompt_tokens=tokens, state_token_count=tokens + int(bool(command.get("one_more"))),
                      choices=(HandoffChoice(first_token=7, finished=bool(command.get("finished"))),),
                      mrope=MropeState(delta=-18, last_position=(3, 4, 5)))
    transfer.finish(handoff)


async def main(arguments: dict[str, object]) -> None:
    layout = transfer_rig.layout(str(arguments.get("dtype", "float32")))
    shard = transfer_rig.rank_of(arguments) or whole(layout)
    held = transfer_rig.tensors(layout, seed=int(str(arguments.get("seed", 1))))
    memory = CacheMemory(layout, transfer_rig.cut(layout, held, shard), shard)
    config = TransferConfig(lease_seconds=float(str(arguments.get("lease", 5.0))))
    store = CacheStore(memory, paths(arguments, memory), replica_id="p0",
                       epoch=int(str(arguments.get("epoch", 1))), rank=shard.rank, config=config)
    server = new_server()
    store.add_to(server)
    say(address=await listen(server, str(arguments.get("listen", "127.0.0.1:0"))))
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transfers: dict[str, SourceTransfer] = {}
    while line := await reader.readline():
        command = json.loads(line)
        if "expect" in command:
            name = command["expect"]
            transfers[name] = store.expect(name, RequestId(name="r"), command["tokens"], Listener(name))
            say(event="expected", id=name)
            if not command.get("hold"):
                await compute(transfers[name], command, len(layout.layers))
        elif "compute" in command:
            await compute(transfers[command["compute"]], command, len(layout.layers))
        elif "fail" in command:
            store.refuse(command["fail"], CancelledError("the client went away"))
        elif "state" in command:
            say(event="state", open=store.open_transfers)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
