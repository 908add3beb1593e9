"""A TCP relay that counts the bytes of connections, and keeps them if they are to be searched. Knows no protocol."""

from __future__ import annotations

import asyncio


class Relay:
    """In front of one address."""

    def __init__(self, target: str, *, keep: bool = False) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._keep = keep
        self.to_target = 0
        self.from_target = 0
        self.kept = [bytearray(), bytearray()]
        """To the target, and from it."""

    async def __aenter__(self) -> Relay:
        self._pumps: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(*self._target)
        for way, (source, target) in enumerate(((reader, there[1]), (there[0], writer))):
            self._pumps.add(asyncio.create_task(self._pump(source, target, way)))

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, way: int) -> None:
        while data := await source.read(1 << 18):
            if way == 0:
                self.to_target += len(data)
            else:
                self.from_target += len(data)
            if self._keep:
                self.kept[way] += data
            target.write(data)
            await target.drain()
        target.close()
