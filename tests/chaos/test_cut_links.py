"""The link between prefill and decode is cut in the middle of a transfer, while both live and the router reaches both."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import httpx
import pytest

from tests.support.cluster import Cluster, free_port
from tests.support.traffic import Ask, send, until_healthy
from tests.support.worker_client import pair

PROMPT = Ask(name="long", path="/v1/completions", body={
    "prompt": "A value from a very long list. " * 120, "max_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 3})


OVER_THE_LINK = ["transfer.channel=grpc"]
"""Else the bytes would go past it: both ends are on one host."""


class Link:
    """Passes bytes on between whoever connects and `target`, until it is cut; connections made after that pass again."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.grew = asyncio.Condition()
        self.passed = 0
        """Bytes from the target so far."""
        self._target = target
        self._open: list[asyncio.StreamWriter] = []
        self._cut: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def listen(self) -> str:
        """`host:port` of its near end."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def cut(self, *, silent: bool) -> None:
        """Close what is open; `silent`: let it stand, but nothing passes any more."""
        self._cut, self._open = self._cut + self._open, []
        if not silent:
            self.close()

    def close(self) -> None:
        """End all that was cut."""
        for writer in self._cut:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._open += [writer, far_writer]
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(self._pass(reader, far_writer, counts=False), self._pass(far_reader, writer, counts=True))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool) -> None:
        while (data := await reader.read(16 << 10)) and writer in self._open:
            writer.write(data)
            await writer.drain()
            if counts:
                async with self.grew:
                    self.passed += len(data)
                    self.grew.notify_all()
        if writer in self._open:
            writer.close()


@pytest.mark.long
@pytest.mark.parametrize("silent", [False, True], ids=["closed", "silent"])
async def test_a_link_that_is_cut_costs_a_resume(tmp_path: Path, silent: bool) -> None:
    port, cluster = free_port(), Cluster(tmp_path)
    link = Link(("127.0.0.1", port))
    try:
        (decode,) = cluster.start_each(("decode", OVER_THE_LINK))
        (prefill,) = cluster.start_each(("prefill", OVER_THE_LINK), listen=f"127.0.0.1:{port}", advertise=await link.listen())
        prefill.address = f"127.0.0.1:{port}"  # the router does not pass through the link
        router = cluster.start_router([prefill, decode])
        async with httpx.AsyncClient(base_url=f"http://{router.address}", timeout=60) as client:
            await until_healthy(client, 20)
            asking = asyncio.create_task(send(client, PROMPT, stream=True))
            async with asyncio.timeout(20), link.grew:
                await link.grew.wait_for(lambda: link.passed > 100 << 10)
            link.cut(silent=silent)
            cut = await asyncio.wait_for(asking, 50)
            assert not cut.error
            again = await send(client, PROMPT, stream=False)
            assert cut == again, "the same tokens as without a cut"
            resumes = [line for line in (await client.get("/metrics")).text.splitlines()
                       if line.startswith("slipstream_router_resumes_total{")]
            assert [line.rpartition(" ")[2] for line in resumes] == ["1.0"], resumes
        async with pair(prefill.address, decode.address) as held:
            await held.until_empty(10)
    finally:
        cluster.close()
        link.close()
