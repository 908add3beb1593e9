"""A real split deployment, seen from outside: its metrics, its insides, its logs at debug level, its record of requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream import checkpoint
from slipstream.text.tokenizer import Tokenizer
from slipstream.v1 import worker_pb2 as pb
from tests.support.cluster import Cluster
from tests.support.command import COMMAND
from tests.support.worker_client import Prompt, pair

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
SECRET = "The quagga of Zanzibar wears 7 violet spectacles"
STOP = "kumquat marmalade"
OUT_OF_RANGE = 987654321
TOTAL = "slipstream_worker_requests_total"


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("record")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, record: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("observe"), log_level="debug")
    workers = cluster.start_workers("prefill", "decode")
    cluster.start_router(workers, [f"debug.record_dir={record}"])
    yield cluster
    assert set(cluster.close().values()) == {0}


@asynccontextmanager
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the router, once that is ready."""
    async with httpx.AsyncClient(base_url=f"http://{cluster.processes['router-0'].address}", timeout=60) as client:
        async with asyncio.timeout(30):
            while (await client.get("/health")).status_code != 200:  # noqa: ASYNC110 (another process: there is only asking)
                await asyncio.sleep(0.1)
        yield client


class Scrape:
    """What every process shows at one moment."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str, str], float] = {}
        self.info: dict[str, dict[str, str]] = {}

    def __call__(self, name: str, process: str, label: str = "") -> float:
        """A sample by its name, its process and what labels it has beside `role`; 0 if there is none."""
        return self.values.get((name, process, label), 0.0)


async def scrape(cluster: Cluster) -> Scrape:
    """Ask all three."""
    result = Scrape()
    async with httpx.AsyncClient(timeout=20) as client:
        for running in cluster.processes.values():
            answer = await client.get(f"http://{running.metrics or running.address}/metrics")
            assert answer.status_code == 200
            for family in text_string_to_metric_families(answer.text):
                for sample in family.samples:
                    labels = dict(sample.labels)
                    if sample.name == "slipstream_worker_info":
                        result.info[running.name] = dict(labels)
                    labels.pop("role", None)
                    result.values[sample.name, running.name, ",".join(labels.values())] = sample.value
    return result


async def until(cluster: Cluster, condition: Callable[[Scrape], bool], seconds: float = 10) -> Scrape:
    """The first scrape for which `condition` holds."""
    last: Scrape | None = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                last = await scrape(cluster)
                if condition(last):
                    return last
                await asyncio.sleep(0.1)
    told = last.values if last is not None else {}
    pytest.fail(f"after {seconds} s: " + str({key: value for key, value in told.items() if value and "_created" not in key[0]}))


async def leave(client: httpx.AsyncClient, prompt: str) -> str:
    """Begin a long answer and go away after its first piece; the request's id."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 3000, "stream": True, "ignore_eos": True}
    async with client.stream("POST", "/v1/completions", json=body) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data:"):
                break
        return stream.headers["x-request-id"]


async def test_both_halves_and_the_router_count_the_same(cluster: Cluster) -> None:
    async with http(cluster) as client:
        for number in range(3):
            body = {"model": "demo", "prompt": f"{number} {SECRET}", "max_tokens": 6, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
    got = await until(cluster, lambda now: [
        now(name, process, label) for process in ("prefill-0", "decode-0")
        for name, label in ((TOTAL, "ok"), ("slipstream_worker_output_tokens_total", ""))] == [3, 3, 3, 3 * 5])
    for name in ("queue_seconds", "prefill_seconds"):
        assert got(f"slipstream_worker_{name}_count", "prefill-0") == 3
    for name in ("transfer_seconds", "decode_seconds"):
        assert got(f"slipstream_worker_{name}_count", "decode-0") == 3
        assert got(f"slipstream_worker_{name}_sum", "decode-0") > 0
    for kind in ("kv", "state"):
        assert got("slipstream_worker_transfer_bytes_total", "decode-0", kind) > 0
        assert (got("slipstream_worker_transfer_bytes_total", "decode-0", kind)
                == got("slipstream_router_transfer_bytes_total", "router-0", kind))
    assert got("slipstream_router_output_tokens_total", "router-0") == 3 * 6
    for process, name in (("prefill-0", "prompt"), ("decode-0", "landed")):
        assert got(f"slipstream_worker_{name}_tokens_total", process) == 3 * usage["prompt_tokens"]
    for process in ("prefill-0", "decode-0"):
        assert got("slipstream_worker_steps_total", process) >= 3
        assert got("slipstream_worker_step_seconds_total", process) > 0
        assert got("process_open_fds", process) > 0
        assert got("slipstream_worker_metric_faults_total", process) == 0


async def test_a_prompt_that_comes_again_is_found_on_both_sides(cluster: Cluster) -> None:
    def hits(now: Scrape) -> tuple[float, float]:
        return (now("slipstream_worker_cached_tokens_total", "prefill-0"),
                now("slipstream_worker_reused_tokens_total", "decode-0"))

    before = await scrape(cluster)
    async with http(cluster) as client:
        for _ in range(2):
            body = {"model": "demo", "prompt": f"Again: {SECRET}", "max_tokens": 2, "ignore_eos": True}
            usage = (await client.post("/v1/completions", json=body)).json()["usage"]
    whole = (usage["prompt_tokens"] - 1) // 16 * 16
    assert whole > 0
    both = ("prefill-0", "decode-0")
    after = await until(cluster, lambda now: hits(now) == tuple(one + whole for one in hits(before)) and not any(
        now("slipstream_worker_kv_blocks_used", process) for process in both))
    for process in both:
        assert after("slipstream_worker_kv_blocks_cached", process) >= whole / 16


async def test_gauges_fall_back_when_everything_is_aborted(cluster: Cluster) -> None:
    before = await scrape(cluster)
    async with http(cluster) as client:
        await asyncio.gather(*(leave(client, f"{number} {SECRET}") for number in range(3)))
    gauges = ("running", "waiting", "parked", "kv_blocks_used", "state_slots_used")
    after = await until(cluster, lambda now: not any(now(f"slipstream_worker_{name}", process) for name in gauges
                                                     for process in ("prefill-0", "decode-0"))
                        and now(TOTAL, "decode-0", "cancelled") - before(TOTAL, "decode-0", "cancelled") == 3)
    assert after("slipstream_router_in_flight", "router-0") == 0


async def test_what_a_worker_is(cluster: Cluster) -> None:
    listed = re.search(r"`slipstream_worker_info\{([\w,]+)\}`", PAGE.read_text())
    assert listed is not None
    info = (await scrape(cluster)).info
    for name, role in (("prefill-0", "prefill"), ("decode-0", "decode")):
        assert info[name].keys() == set(listed[1].split(","))
        assert (info[name]["replica_id"], info[name]["role"], info[name]["block_size"]) == (name, role, "16")
        said = [line["message"] for line in cluster.processes[name].log() if "min_cacheable_prefix 16" in line["message"]]
        assert len(said) == 1, "the log says it too, once"


async def test_who_holds_memory_and_what_runs(cluster: Cluster) -> None:
    body = {"model": "demo", "prompt": SECRET, "max_tokens": 3000, "stream": True, "ignore_eos": True}
    async with http(cluster) as client, client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        name = stream.headers["x-request-id"]
        async with asyncio.timeout(10):
            while True:
                replicas = {one["role"]: one for one in (await client.get("/status?detail=1")).json()["replicas"]}
                mine = [one for one in replicas["decode"]["holdings"] if one["request_id"] == name]
                if [one["owner"] for one in mine] == ["sequence"]:
                    break
        assert mine[0]["blocks"] > 0
        assert mine[0]["state_slots"] == 1
        for one in replicas.values():
            assert sum(row["blocks"] for row in one["holdings"]) == one["total_blocks"]
            assert {"op": "rms_norm", "implementation": "reference.rms_norm",
                    "reason": "reference is the only backend"} in one["kernels"]
        assert "holdings" not in (await client.get("/status")).json()["replicas"][0]
        assert {one["metrics_address"] for one in replicas.values()} == {
            running.metrics for running in cluster.processes.values() if running.metrics}
        command = [COMMAND, "status", "--kernels", "--ledger", "--url", str(client.base_url)]
        shown = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        assert shown.returncode == 0, shown.stderr
        assert re.search(rf"sequence +{name} +\d+ +1", shown.stdout), shown.stdout
        assert re.search(r"gated_delta_step +reference\.gated_delta_step +reference is the only backend", shown.stdout)

        os.kill(cluster.processes["decode-0"].pid, signal.SIGUSR1)
        async with asyncio.timeout(10):
            while not (told := [line for line in cluster.processes["decode-0"].log() if "holdings" in line]):  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.05)
        assert {(one["owner"], one.get("request_id", "")) for one in told[0]["holdings"]} >= {("sequence", name)}
        assert told[0]["kernels"] == replicas["decode"]["kernels"]


async def refused(client: httpx.AsyncClient) -> None:
    """Requests that fail, with texts of the client's in all places where an error could quote them."""
    bodies: list[dict[str, Any]] = [
        {"model": SECRET, "prompt": "x"}, {"model": "demo", "prompt": SECRET, "max_tokens": SECRET},
        {"model": "demo", "prompt": SECRET, "logit_bias": {str(OUT_OF_RANGE): 1}}, {"model": "demo", "prompt": [OUT_OF_RANGE]},
        {"model": "demo", "prompt": SECRET * 5000}]
    for body in bodies:
        assert 400 <= (await client.post("/v1/completions", json=body)).status_code < 500
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{SECRET}"}}
    for messages in ([{"role": SECRET, "content": "x"}], [{"role": "user", "content": [image]}], [{"role": "user", SECRET: 1}]):
        assert (await client.post("/v1/chat/completions", json={"model": "demo", "messages": messages})).status_code == 400
    body = {"model": "demo", "prompt": SECRET, "max_tokens": 3000, "ignore_eos": True}
    late = await client.post("/v1/completions", json=body, headers={"x-request-timeout-seconds": "0.05"})
    assert late.status_code == 504


async def test_no_log_has_a_prompt_an_output_or_a_tensor(cluster: Cluster) -> None:
    tokenizer = Tokenizer(checkpoint.DEMO)
    async with (http(cluster) as client,
                pair(cluster.processes["prefill-0"].address, cluster.processes["decode-0"].address) as workers):
        messages = [{"role": "system", "content": STOP}, {"role": "user", "content": SECRET}]
        answer = (await client.post("/v1/chat/completions", json={
            "model": "demo", "messages": messages, "max_tokens": 30, "min_tokens": 30, "logprobs": True, "top_logprobs": 3,
            "stop": [STOP]})).json()
        text = answer["choices"][0]["message"]["content"]
        ids = tokenizer.encode(SECRET)
        assert (await client.post("/v1/completions", json={"model": "demo", "prompt": ids, "max_tokens": 3})).status_code == 200
        left = await leave(client, SECRET)
        await refused(client)
        to_prefill, to_decode = await workers.submits(Prompt(tokens=[5, OUT_OF_RANGE]))
        leg = await workers.prefill.submit(to_prefill)
        other = await workers.decode.submit(to_decode)
        assert (await leg.failed()).code == pb.ERROR_CODE_INVALID
        await workers.decode.cancel(other.handle)
        await other.failed()
        await workers.until_empty()
    assert len(text) > 10
    lines = {name: running.child.log_path.read_text().splitlines() for name, running in cluster.processes.items()}
    records = [json.loads(line) for name in lines for line in lines[name]]  # every line is JSON
    assert {"time", "level", "process", "logger", "message"} <= set.intersection(*(set(record) for record in records))
    assert any(record["level"] == "debug" for record in records), "debug lines were looked at too"
    assert {record["process"] for record in records if record.get("request_id", "").startswith(left)} >= {"router"}
    everything = "\n".join("\n".join(lines[name]) for name in lines)
    for forbidden in (SECRET, "quagga", "Zanzibar", "spectacles", STOP, json.dumps(text)[1:-1], str(OUT_OF_RANGE), "tensor(",
                      "array("):
        assert forbidden not in everything
    assert not re.search(r"\[\d+, \d+, \d+", everything), "a list of numbers, such as token ids"
    assert not re.search(r"\b" + r"\D{1,3}".join(map(str, ids[:3])) + r"\b", everything)


def recorded(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_the_record_is_enough_to_ask_again(cluster: Cluster, record: Path) -> None:
    async with http(cluster) as client:
        body = {"model": "demo", "prompt": SECRET, "max_tokens": 12, "ignore_eos": True, "temperature": 2.0}
        answer = await client.post("/v1/completions", json=body)
        name, text = answer.headers["x-request-id"], answer.json()["choices"][0]["text"]
        (kept,) = [row for row in recorded(record) if row["id"] == name]
        again = await client.post("/v1/completions", json={**body, "prompt": kept["prompt"], "seed": kept["sampling"]["seed"]})
        assert again.json()["choices"][0]["text"] == text
        (repeated,) = [row for row in recorded(record) if row["id"] == again.headers["x-request-id"]]
    assert kept["output"] == repeated["output"]
    assert [len(tokens) for tokens in kept["output"]] == [12]
    assert kept["code"] == "ok"
    assert kept["seconds"] > 0
    warnings = [line["message"] for line in cluster.processes["router-0"].log() if line["level"] == "warning"]
    assert sum("RECORDED" in message for message in warnings) == 1
