"""A transfer over a slow link between real processes, one side of two ranks: seen in flight by `slipstream transfers`, then in
the logs and metrics of every rank."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from launch.transfers import joined
from tests.support.cluster import Cluster, Running
from tests.support.command import COMMAND
from tests.support.traffic import until_healthy

SLOW = ["transfer.faults.bytes_per_second=80000", "transfer.channel=grpc", "transfer.frame_bytes=8192"]


async def command(url: str, *more: str) -> str:
    shown = await asyncio.to_thread(subprocess.run, [COMMAND, "transfers", "--url", url, *more], capture_output=True, text=True,
                                    timeout=60)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def ended(running: Running) -> list[dict[str, Any]]:
    return [line for line in running.log() if line["message"].startswith("transfer ended")]


async def streams(running: Running) -> dict[tuple[str, ...], float]:
    """How many streams ended, by (side, channel, outcome)."""
    async with httpx.AsyncClient(timeout=20) as client:
        text = (await client.get(f"http://{running.metrics}/metrics")).text
    return {(sample.labels["side"], sample.labels["channel"], sample.labels["outcome"]): sample.value
            for family in text_string_to_metric_families(text) for sample in family.samples
            if sample.name == "slipstream_worker_streams_total"}


@pytest.mark.long
@pytest.mark.timeout(180)
async def test_a_slow_transfer_is_seen_in_flight_on_all_ranks(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        sources = cluster.start_gang("prefill", 2, 1, SLOW)
        decode = cluster.start_workers("decode")[0]
        url = f"http://{cluster.start_router([sources[0], decode]).address}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await until_healthy(client, 60)
            assert "no transfer is in flight" in await command(url)
            body = {"model": "demo", "prompt": list(range(40, 440)), "max_tokens": 4, "ignore_eos": True}
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            looks: list[dict[str, Any]] = []
            while len(looks) < 2:
                assert not asked.done(), "it is over before it was seen"
                told = (await client.get("/status?detail=transfers")).json()["replicas"]
                if [one["phase"] for replica in told for one in replica["transfers"]] != ["moving"] * 4:
                    continue  # two streams, both ends
                (seen,) = joined(told)
                if not looks or seen["bytes"] > looks[-1]["bytes"]:
                    looks.append(seen)
            shown, table = await asyncio.gather(command(url, "--json"), command(url))
            answer = await asked
        name = answer.headers["x-request-id"]
        assert answer.status_code == 200, answer.text
        (early, middle), (late,) = looks, json.loads(shown)["transfers"]
        for one in (early, middle, late):
            assert (one["prefill"], one["decode"], one["channel"], one["phase"]) == ("prefill-0", "decode-0", "grpc", "moving")
            assert one["request_id"] == name
            assert [(each["prefill_rank"], each["decode_rank"]) for each in one["streams"]] == [(0, 0), (1, 0)]
            assert all(0 < each["kv_bytes"] + each["state_bytes"] < each["total_bytes"] for each in one["streams"])
        assert early["bytes"] < middle["bytes"] <= late["bytes"] < late["total_bytes"] == early["total_bytes"]
        assert 0 < early["age_seconds"] < late["age_seconds"]
        assert json.loads(shown)["problems"] == []
        assert name in table
        assert "prefill-0 -> decode-0" in table

        async with asyncio.timeout(10):
            while sum(len(ended(each)) for each in (*sources, decode)) < 4:  # noqa: ASYNC110 (other processes)
                await asyncio.sleep(0.05)
        lines = {(line["side"], line["rank"] if line["side"] == "send" else line["peer_rank"]): line
                 for each in (*sources, decode) for line in ended(each)}
        assert {line["request_id"] for line in lines.values()} == {name}
        assert {line["outcome"] for line in lines.values()} == {"committed"}
        for rank in (0, 1):
            sent, received = lines["send", rank], lines["receive", rank]
            for kind in ("kv_bytes", "state_bytes"):
                assert sent[kind] == received[kind] > 0
        assert late["total_bytes"] == sum(lines["send", rank][kind] for rank in (0, 1) for kind in ("kv_bytes", "state_bytes"))
        for source in sources:
            assert await streams(source) == {("send", "grpc", "committed"): 1.0}
        assert await streams(decode) == {("receive", "grpc", "committed"): 2.0}
        assert set(cluster.close().values()) == {0}
    finally:
        cluster.close()
