"""Two hosts: network namespaces with a cable between them, a Ray node in each. Prefill on one and decode on the other; and a
replica with a rank on each, whose rank is killed and whose cable is cut.

Needs root. Where namespaces are not allowed it is skipped with the reason, but never in continuous integration.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from tests.support.command import COMMAND
from tests.support.traffic import Ask, Reply, asks, send

RAY = str(Path(sys.executable).parent / "ray")
HERE, THERE = "10.77.0.1", "10.77.0.2"
OPEN = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
PICTURE = Path(__file__).parents[1] / "samples" / "img_lookup-0-0.png"
CONFIG = f"""
[pools.prefill]
role = "prefill"
cpus = 0.5
resources = {{ prefill_host = 0.1 }}

[pools.decode]
role = "decode"
cpus = 0.5
resources = {{ decode_host = 0.1 }}

[router]
host = "0.0.0.0"
cpus = 0.5

[ray]
address = "{HERE}:6379"
placement_seconds = 30.0
"""
GANGS = f"""
[pools.prefill]         # both ranks there: a bundle never spans hosts
role = "prefill"
tp = 2
cpus = 0.25
resources = {{ there = 0.1 }}

[pools.decode]          # a stage on each host: a host has room for one
role = "decode"
pp = 2
cpus = 0.25
resources = {{ stage = 1 }}

[pools.spare-prefill]
role = "prefill"
replicas = 0
cpus = 0.25
resources = {{ here = 0.1 }}

[pools.spare-decode]
role = "decode"
replicas = 0
cpus = 0.25
resources = {{ here = 0.1 }}

[router]
host = "0.0.0.0"
cpus = 0.25

[ray]
address = "{HERE}:6379"
placement_seconds = 30.0
"""
T = TypeVar("T")
LIBC = ctypes.CDLL(None, use_errno=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Hosts:
    """Two namespaces, and whatever was started in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = (f"here-{os.getpid()}", f"there-{os.getpid()}")
        self._running: list[subprocess.Popen[bytes]] = []

    def connect(self) -> None:
        """Make them, with a cable between."""
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", "cable-a", "netns", self.names[0], "type", "veth", "peer", "name", "cable-b", "netns", self.names[1])
        for name, end, address in zip(self.names, ("cable-a", "cable-b"), (HERE, THERE), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            for device in ("lo", end):
                ip("-n", name, "link", "set", device, "up")

    def start(self, host: int, *command: str, log: str) -> subprocess.Popen[bytes]:
        """Start a command in a namespace, in a session of its own."""
        with (self.folder / log).open("wb") as file:
            made = subprocess.Popen(["ip", "netns", "exec", self.names[host], *command], env=os.environ | OPEN, stdout=file,
                                    stderr=subprocess.STDOUT, start_new_session=True)
        self._running.append(made)
        return made

    def run(self, host: int, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a namespace."""
        return subprocess.run(["ip", "netns", "exec", self.names[host], *command], env=os.environ | OPEN, capture_output=True,
                              text=True, timeout=120, check=False)

    def inside(self, host: int, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in a namespace: sockets belong to that of the thread that makes them."""
        def run() -> T:
            with open(f"/run/netns/{self.names[host]}") as file:
                assert LIBC.setns(file.fileno(), 0) == 0
            return asyncio.run(work())

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(run).result()

    def ranks(self, host: int) -> dict[tuple[str, str], int]:
        """Process ids of the ranks that run in a namespace, by replica and rank."""
        pids = subprocess.run(["ip", "netns", "pids", self.names[host]], check=True, capture_output=True, text=True).stdout
        found = {}
        for pid in pids.split():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if "--rank" in words:
                    found[words[words.index("--replica-id") + 1], words[words.index("--rank") + 1]] = int(pid)
        return found

    def start_ray(self, here: dict[str, float], there: dict[str, float]) -> None:
        """A node with these resources in each namespace."""
        node = ["--block", "--num-cpus=3", "--num-gpus=0", "--object-store-memory=83886080"]
        self.start(0, RAY, "start", "--head", *node, f"--node-ip-address={HERE}", "--port=6379", "--include-dashboard=false",
                   f"--temp-dir={self.folder}/r", f"--resources={json.dumps(here)}", log="head")
        self.wait_for("head", "This command will now block")
        self.start(1, RAY, "start", f"--address={HERE}:6379", *node, f"--node-ip-address={THERE}",
                   f"--resources={json.dumps(there)}", log="node")
        self.wait_for("node", "This command will now block")

    def serve(self, config: str) -> tuple[subprocess.Popen[bytes], str]:
        """`slipstream serve` here, and its URL."""
        (self.folder / "two.toml").write_text(config)
        serve = self.start(0, COMMAND, "serve", "--config", str(self.folder / "two.toml"), "--set",
                           f"ray.log_dir={self.folder}/logs", log="serve")
        return serve, self.wait_for("serve", r"ready at (http://\S+);")[1]

    def wait_for(self, log: str, pattern: str, seconds: float = 120) -> re.Match[str]:
        """Wait until the log of what was started last says so."""
        deadline = time.monotonic() + seconds
        while (match := re.search(pattern, (self.folder / log).read_text())) is None:
            assert self._running[-1].poll() is None, (self.folder / log).read_text()[-3000:]
            assert time.monotonic() < deadline, (self.folder / log).read_text()[-3000:]
            time.sleep(0.2)
        return match

    def close(self) -> None:
        """End what was started, last first, and take the cable out."""
        for one in reversed(self._running):
            if one.poll() is None:
                one.send_signal(signal.SIGTERM)
                try:
                    one.wait(40)
                except subprocess.TimeoutExpired:
                    os.killpg(one.pid, signal.SIGKILL)
                    one.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    # Short: Ray puts sockets below it.
    with tempfile.TemporaryDirectory(prefix="h-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        made = Hosts(Path(folder))
        try:
            made.connect()
        except (OSError, subprocess.CalledProcessError) as error:
            made.close()
            if os.environ.get("CI"):
                raise
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', '') or error}")
        try:
            yield made
        finally:
            for log in (made.folder / "serve", *made.folder.glob("logs/*.log")):  # shown when the test fails
                print(f"--- {log.name}\n{log.read_text()[-4000:] if log.exists() else ''}")
            made.close()


@pytest.mark.timeout(400)
def test_prefill_here_and_decode_there(hosts: Hosts) -> None:
    hosts.start_ray({"prefill_host": 1}, {"decode_host": 1})
    serve, url = hosts.serve(CONFIG)
    status = hosts.run(1, COMMAND, "status", "--url", url)
    lines = {line.split()[0]: line for line in status.stdout.splitlines() if "-0 " in line}
    assert f" {HERE}:" in lines["prefill-0"], status.stdout
    assert f" {THERE}:" in lines["decode-0"], status.stdout
    said = hosts.run(1, COMMAND, "chat", "What is in row 2, column 3?", "--image", str(PICTURE), "--url", url)
    assert said.stdout == "A purple triangle.\n", said.stderr

    serve.send_signal(signal.SIGTERM)
    assert serve.wait(60) == 0, (hosts.folder / "serve").read_text()


async def ask(url: str, kinds: Sequence[Ask], then: Callable[[], None] = lambda: None) -> list[Reply]:
    """The replies to all of them at once; `then` is called when each has begun."""
    begun = 0

    async with httpx.AsyncClient(base_url=url, timeout=100) as client:
        asked = [asyncio.create_task(send(client, kind, stream=True)) for kind in kinds]
        async with asyncio.timeout(30):
            while not begun:
                status = (await client.get("/status")).json()["replicas"]
                begun = sum(one["load"]["running"] for one in status if one["role"] == "decode" and "load" in one) == len(kinds)
        then()
        return await asyncio.gather(*asked)


async def replicas(url: str) -> dict[str, dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        return {one["replica_id"]: one for one in (await client.get("/status")).json()["replicas"]}


@pytest.mark.timeout(400)
def test_a_replica_that_spans_both(hosts: Hosts) -> None:
    samples = [one for one in asks() if one.answer][::7]
    long = [one for one in asks() if one.name in ("long-5", "long-6", "long-7", "sampled-9")]
    assert any("image_url" in json.dumps(one.body) for one in samples)
    hosts.start_ray({"here": 1, "stage": 1}, {"there": 1, "stage": 1})
    serve, url = hosts.serve(GANGS)

    def answers(kinds: Sequence[Ask], then: Callable[[], None] = lambda: None) -> list[Reply]:
        return hosts.inside(0, lambda: ask(url, kinds, then))

    def right() -> None:
        async def each() -> list[Reply]:
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                return [await send(client, one, stream=False) for one in samples]

        told = hosts.inside(0, each)
        assert [{choice.text.strip() for choice in one.choices} for one in told] == [{one.answer.strip()} for one in samples]

    right()
    wanted = answers(long)
    assert not [one.error for one in wanted if one.error]
    here, there = hosts.ranks(0), hosts.ranks(1)
    assert len(here) == 1, "one stage of decode"
    (name, rank), = here
    (other,) = {"0", "1"} - {rank}
    assert (name, set(there)) == ("decode-0", {("prefill-0", "0"), ("prefill-0", "1"), ("decode-0", other)})

    def kill() -> None:
        os.kill(there["decode-0", other], signal.SIGKILL)
        deadline = time.monotonic() + 5
        while os.path.exists(f"/proc/{here['decode-0', rank]}"):
            assert time.monotonic() < deadline, "the rank on the other host goes on"
            time.sleep(0.05)

    assert answers(long, kill) == wanted, "the same tokens from the next epoch"
    hosts.wait_for("serve", r"(?s)decode-0 ended with .*; starting epoch 2.*decode-0 serves at")
    assert hosts.inside(0, lambda: replicas(url))["decode-0"]["epoch"] == 2
    right()

    scaled = hosts.run(0, COMMAND, "scale", "spare-prefill=1", "spare-decode=1", "--url", url)
    assert scaled.returncode == 0, scaled.stderr
    begun = time.monotonic()
    assert answers(long, lambda: ip("-n", hosts.names[0], "link", "set", "cable-a", "down")) == wanted, "what is here goes on"
    assert time.monotonic() - begun < 60
    right()
    deadline = time.monotonic() + 90
    for name in ("prefill-0", "decode-0"):
        while (row := hosts.inside(0, lambda: replicas(url))[name])["state"] != "restarting":
            assert (row["state"], time.monotonic() < deadline) == ("disconnected", True)
            time.sleep(0.5)
    serve.send_signal(signal.SIGTERM)
    assert serve.wait(60) == 0, "what cannot be reached is in nobody's way"
