"""A conversation over HTTP on several replicas: what decode has of it goes to prefill, which computes only what is new."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cache_transfer.layout import CacheLayout
from slipstream import checkpoint
from slipstream.checkpoint import DEMO
from slipstream.v1 import worker_pb2 as pb
from tests.support.cluster import Cluster
from tests.support.samples import FOLDER
from tests.support.traffic import until_healthy
from tests.support.worker_client import Leg, Pair, Prompt, pair

_LAYOUT = CacheLayout(model_name="demo", weights_revision="", layers=checkpoint.read(DEMO).layers, block_size=16,
                      kv_dtype="float32", conv_dtype="float32")
KV_BYTES, STATE_BYTES = _LAYOUT.bytes_necessary(1)
LONG = "Name the animals of the farm. The cow, the hen, the goose and the old grey horse live there. " * 3


async def test_three_turns_are_loaded_and_get_the_answers_of_one_process(tmp_path: Path) -> None:
    """The demo model is a hybrid that sees: a picture first. One router loads, the other never does."""
    cluster = Cluster(tmp_path)
    workers = cluster.start_workers("prefill", "decode")
    cluster.start_router(workers, ["router.routing.load_tokens=16", "router.routing.predict_seconds=0"])
    cluster.start_router(workers, ["router.routing.load_tokens=0"])
    picture = base64.b64encode(next(FOLDER.glob("*.png")).read_bytes()).decode()
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}, {"type": "text", "text": LONG}]

    async with (httpx.AsyncClient(base_url=f"http://{cluster.processes['router-0'].address}", timeout=60) as loads,
                httpx.AsyncClient(base_url=f"http://{cluster.processes['router-1'].address}", timeout=60) as plain):
        async def ask(http: httpx.AsyncClient, said: list[dict[str, Any]], salt: str) -> dict[str, Any]:
            reply = await http.post("/v1/chat/completions", json={
                "model": "demo", "messages": said, "temperature": 0, "max_tokens": 40, "min_tokens": 40, "cache_salt": salt})
            assert reply.status_code == 200, reply.text
            return {**reply.json(), "events": (await http.get(f"/explain/{reply.json()['id']}")).json()["events"]}

        async def talk(http: httpx.AsyncClient, salt: str) -> list[dict[str, Any]]:
            said: list[dict[str, Any]] = [{"role": "user", "content": parts}]
            answers = []
            for turn in range(3):
                answers.append(await ask(http, said, salt))
                said += [{"role": "assistant", "content": answers[-1]["choices"][0]["message"]["content"]},
                         {"role": "user", "content": f"And number {turn}?"}]
            return answers

        await until_healthy(loads, 30)
        await until_healthy(plain, 30)
        found, right = await talk(loads, "a"), await talk(plain, "b")
        told = (await loads.get("/metrics")).text
    complaints = [line for running in cluster.processes.values() for line in running.complaints()]
    assert set(cluster.close().values()) == {0}
    assert not complaints
    texts = [[one["choices"][0]["message"]["content"] for one in talks] for talks in (found, right)]
    assert texts[0] == texts[1]
    for one, other in zip(found[1:], right[1:], strict=True):
        (load,) = [event for event in one["events"] if event["event"] == "load"]
        assert (load["outcome"], load["load_from"]) == ("loaded", "decode-0")
        cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in (one, other)]
        assert cached[0] - cached[1] == load["tokens"] == 32, "whole blocks of the answer"
        assert load["kv_bytes"] == 32 * KV_BYTES
        assert load["state_bytes"] == STATE_BYTES
    assert 'slipstream_router_cache_loads_total{outcome="loaded"} 2' in told
    assert "slipstream_router_loaded_tokens_total 64" in told


@asynccontextmanager
async def slow(cluster: Cluster) -> AsyncIterator[Pair]:
    """Decode sends so slowly that a load takes a second and more."""
    prefill, decode = cluster.start_each(("prefill", ["engine.kv_cache_tokens=800"]),
                                         ("decode", ["transfer.faults.bytes_per_second=150000"]))
    async with pair(prefill.address, decode.address) as workers:
        yield workers


async def load(workers: Pair, tokens: list[int], seconds: float = 20, salt: str = "") -> tuple[Leg, Leg]:
    """The two legs, lender and borrower."""
    asked = pb.Submit(handle=uuid.uuid4().int >> 65, request_id=f"load-{uuid.uuid4().hex}", transfer_id=uuid.uuid4().hex,
                      tokens=tokens, cached=True, cache_salt=salt, remaining_ms=int(1000 * seconds))
    lender = await workers.decode.submit(asked)
    source = workers.decode.info
    return lender, await workers.prefill.submit(pb.Submit(
        **{name.name: value for name, value in asked.ListFields()}, prefill_addresses=source.cache_store_addresses,
        prefill_epoch=source.epoch))


@pytest.mark.long
async def test_a_load_that_goes_wrong_leaves_nothing_on_either_side(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    async with slow(cluster) as workers:
        tokens = [(7 * number) % 900 for number in range(40)]
        answer = await workers.ask(Prompt(tokens=tokens, max_tokens=60, ignore_eos=True))
        turn = [*tokens, *answer.tokens, 3, 4, 5]
        for leg in await load(workers, turn, salt="of another tenant"):
            assert (await leg.failed(5)).code == pb.ERROR_CODE_UNAVAILABLE
        await workers.until_empty()

        for cancelled in (workers.prefill, workers.decode):
            legs = await load(workers, turn)
            await workers.decode.until(lambda: workers.decode.load.free_state_slots < workers.decode.info.total_state_slots)
            await cancelled.cancel(legs[0].handle)
            for leg in legs:
                await leg.failed(5)
            await workers.until_empty()

        late = await load(workers, turn, seconds=0.5)
        for leg in late:
            assert (await leg.failed(5)).code in (pb.ERROR_CODE_DEADLINE, pb.ERROR_CODE_UNAVAILABLE)
        await workers.until_empty()

        full = await workers.prefill.submit((await workers.submits(Prompt(tokens=[9] * 760, max_tokens=9, fresh=True)))[0])
        await asyncio.wait_for(full.news.wait(), 20)  # parked: it holds nearly all blocks
        lender, borrower = await load(workers, turn)
        assert (await borrower.failed(5)).code == pb.ERROR_CODE_BUSY
        await lender.failed(5)
        await workers.prefill.cancel(full.handle)
        await workers.until_empty()

        lender, borrower = await load(workers, turn)
        loaded = await borrower.finished()
        await lender.finished()
        assert (loaded.stats.cached_tokens, loaded.stats.kv_bytes) == (64, 64 * KV_BYTES), "prefill had two blocks itself"
        assert loaded.stats.state_bytes == STATE_BYTES
        await workers.until_empty()
        again = await workers.ask(Prompt(tokens=turn, max_tokens=4))
        assert again.prefill.cached_tokens == 96

        _, borrower = await load(workers, [*turn, *again.tokens, 8])
        await workers.decode.until(lambda: workers.decode.load.free_state_slots < workers.decode.info.total_state_slots)
        cluster.kill(cluster.processes["decode-0"])
        assert (await borrower.failed(5)).code == pb.ERROR_CODE_UNAVAILABLE
        await workers.prefill.until_empty()
    cluster.close()


@pytest.mark.long
async def test_ranks_that_are_cut_differently_load_a_turn(tmp_path: Path) -> None:
    """Decode TP2, prefill PP2: every rank lends and takes its part, states too; tokens are those of the turn computed whole."""
    cluster = Cluster(tmp_path)
    prefill, decode = cluster.start_gang("prefill", 1, 2)[0], cluster.start_gang("decode", 2, 1)[0]
    async with pair(prefill.address, decode.address) as workers:
        tokens = [(7 * number) % 900 for number in range(40)]
        answer = await workers.ask(Prompt(tokens=tokens, max_tokens=60, ignore_eos=True))
        turn = [*tokens, *answer.tokens, 3, 4, 5]
        right = await workers.ask(Prompt(tokens=turn, max_tokens=24, ignore_eos=True, fresh=True))
        for leg in await load(workers, turn, salt="of another tenant"):
            await leg.failed(5)
        lender, borrower = await load(workers, turn)
        assert (await borrower.finished()).stats.cached_tokens == 64
        await lender.finished()
        await workers.until_empty()
        found = await workers.ask(Prompt(tokens=turn, max_tokens=24, ignore_eos=True))
        assert found.prefill.cached_tokens == 96
        assert found.tokens == right.tokens
        await workers.until_empty()
    assert set(cluster.close().values()) == {0}
