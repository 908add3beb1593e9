"""Deployments of replicas with several ranks: both examples, and what Ray places, restarts and hands over in a cluster of nodes
with labels and GPUs."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.command import COMMAND, Command
from tests.support.ray_nodes import OPEN, RayNodes, ray_nodes
from tests.support.traffic import asks, send

pytestmark = pytest.mark.deployment

EXAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "examples"
NODES = [{"num_cpus": 1, "num_gpus": 0, "labels": {"kind": "head"}},
         {"num_cpus": 1, "num_gpus": 2, "labels": {"kind": "prefill"}, "resources": {"nic": 2}},
         {"num_cpus": 1, "num_gpus": 4, "labels": {"kind": "decode"}}]
FREE = {"head": {"CPU": 1, "GPU": 0, "nic": 0}, "prefill": {"CPU": 1, "GPU": 2, "nic": 2},
        "decode": {"CPU": 1, "GPU": 4, "nic": 0}}
PLACED = ["pools.prefill.tp=2", "pools.prefill.gpus=1", "pools.prefill.cpus=0.25", "pools.prefill.labels.kind=prefill",
          "pools.prefill.resources.nic=0.5", "pools.decode.pp=2", "pools.decode.gpus=2", "pools.decode.cpus=0.25",
          "pools.decode.labels.kind=decode", "router.cpus=0.25", "router.port=0", "model.device=cpu"]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(NODES) as made:
        yield made


def serve(nodes: RayNodes, *more: str) -> Command:
    settings = [*PLACED, f"ray.address={nodes.address}", *more]
    return Command(["serve", *(part for setting in settings for part in ("--set", setting))], OPEN)


def ranks(nodes: RayNodes) -> dict[str, dict[int, int]]:
    """Process ids of what runs in this cluster, by replica and rank."""
    found: dict[str, dict[int, int]] = {}
    for entry in os.listdir("/proc"):
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().decode().split("\0") if entry.isdigit() else []
        except OSError:
            continue
        if {"--rank", "--config-json"} <= set(words) and nodes.address in words[words.index("--config-json") + 1]:
            after = dict(itertools.pairwise(words))
            found.setdefault(after["--replica-id"], {})[int(after["--rank"])] = int(entry)
    return found


def gpus(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return next(one for one in variables if one.startswith("CUDA_VISIBLE_DEVICES=")).partition("=")[2]


def counts(url: str) -> bool:
    return subprocess.run([COMMAND, "chat", "Count 3 to 5.", "--url", url], capture_output=True, text=True,
                          timeout=60).stdout == "3, 4, 5.\n"


def until_it_counts(url: str) -> None:
    deadline = time.monotonic() + 60
    while not counts(url):
        assert time.monotonic() < deadline, "the router did not find the replica"


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("example", ["parallel.toml", "replicas.toml"])
async def test_the_examples_answer_right_and_leave_nothing(example: str) -> None:
    samples = [ask for ask in asks() if ask.answer]
    run = Command(["serve", "--config", str(EXAMPLES / example), "--set", "router.port=0"])
    try:
        url = (await asyncio.to_thread(run.wait_for, r"ready at (http://\S+);"))[1]
        assert len(re.findall(r"serves at", run.text)) == {"parallel.toml": 3, "replicas.toml": 5}[example]
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            replies = await asyncio.gather(*(send(client, ask, stream=bool(number % 2)) for number, ask in enumerate(samples)))
        assert not [reply.error for reply in replies if reply.error]
        for asked, reply in zip(samples, replies, strict=True):
            assert {choice.text.strip() for choice in reply.choices} == {asked.answer.strip()}, asked.name
        run.signal(signal.SIGTERM)
        assert await asyncio.to_thread(run.wait) == 0, run.text
        assert run.leftovers() == []
    finally:
        run.clean_up()


def test_a_cut_that_the_model_does_not_allow_is_refused_before_anything_starts() -> None:
    run = Command(["serve", "--set", "pools.prefill.tp=3"])
    try:
        assert run.wait() == 2
        assert re.fullmatch(r"slipstream: pools\.prefill: tp 3 does not cut .* evenly .*; legal: 1, 2, 4\n", run.text), run.text
    finally:
        run.clean_up()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_gang_is_placed_restarted_and_taken_over_whole(nodes: RayNodes) -> None:
    runs = [serve(nodes)]
    try:
        url = runs[0].wait_for(r"ready at (http://\S+);")[1]
        assert counts(url)
        state = nodes.state()
        assert state["free"]["prefill"] == {"CPU": 0.5, "GPU": 0, "nic": 1}
        assert state["free"]["decode"]["GPU"] == 0
        assert state["groups"] == ["decode-0", "prefill-0", "router-0"]
        assert state["actors"] == ["decode-0/1", "decode-0/1/1", "lease", "prefill-0/1", "prefill-0/1/1", "router-0/1"]
        first = ranks(nodes)
        assert {name: set(found) for name, found in first.items()} == {"prefill-0": {0, 1}, "decode-0": {0, 1}}
        assert sorted(gpus(pid) for pid in first["prefill-0"].values()) == ["0", "1"]
        assert sorted(gpus(pid) for pid in first["decode-0"].values()) == ["0,1", "2,3"]

        os.kill(first["decode-0"][1], signal.SIGKILL)
        runs[0].wait_for(r"(?s)decode-0 ended with signal SIGKILL of rank 1; starting epoch 2.*decode-0 serves at")
        second = ranks(nodes)
        assert second["prefill-0"] == first["prefill-0"]
        assert not set(second["decode-0"].values()) & set(first["decode-0"].values())
        until_it_counts(url)

        runs[0].signal(signal.SIGKILL)
        runs[0].wait()
        assert counts(url), "no supervisor, no service"
        os.kill(second["prefill-0"][1], signal.SIGKILL)
        runs.append(serve(nodes))
        assert runs[1].wait_for(r"ready at (http://\S+);")[1] == url
        assert re.findall(r"(\S+) goes on at", runs[1].text) == ["decode-0", "router-0"]
        third = ranks(nodes)
        assert third["decode-0"] == second["decode-0"]
        assert not set(third["prefill-0"].values()) & set(second["prefill-0"].values())
        until_it_counts(url)
        runs[1].signal(signal.SIGTERM)
        assert runs[1].wait() == 0, runs[1].text
        nodes.until(free=FREE, groups=[], actors=[])
        assert ranks(nodes) == {}
    finally:
        for one in runs:
            one.clean_up()


@pytest.mark.long
@pytest.mark.timeout(120)
def test_what_has_no_place_is_named_with_what_is_missing(nodes: RayNodes) -> None:
    for setting, missing in [
        ("pools.decode.pp=3", "no node is left for stage 2 of decode-0, which needs CPU 0.25, GPU 2 on one node with label "
                              "kind decode; there is room for 2 such: "),
        ("pools.decode.labels.kind=other", "no node is large enough for stage 0 of decode-0, which needs CPU 0.25, GPU 2 on "
                                           "one node with label kind other: "),
        ("pools.prefill.resources.nic=1.5", "has CPU 1, GPU 2, nic 2, missing nic 1"),
    ]:
        run = serve(nodes, setting, f"ray.deployment=other-{len(missing)}")
        try:
            run.wait_for("joining")
            begun = time.monotonic()
            assert run.wait() == 1
            assert missing in run.text
            assert time.monotonic() - begun < 20, "the wait for room and the end of the process"
        finally:
            run.clean_up()
    nodes.until(free=FREE, groups=[], actors=[])
