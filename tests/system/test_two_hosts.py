"""Two hosts: network namespaces with a cable between them, a Ray node in each; prefill on one, decode on the other.

Needs root. Where namespaces are not allowed it is skipped with the reason, but never in continuous integration.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import COMMAND

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
            made.close()


@pytest.mark.timeout(400)
def test_prefill_here_and_decode_there(hosts: Hosts) -> None:
    node = ["--block", "--num-cpus=2", "--num-gpus=0", "--object-store-memory=83886080"]
    hosts.start(0, RAY, "start", "--head", *node, f"--node-ip-address={HERE}", "--port=6379", "--include-dashboard=false",
                f"--temp-dir={hosts.folder}/r", '--resources={"prefill_host": 1}', log="head")
    hosts.wait_for("head", "This command will now block")
    hosts.start(1, RAY, "start", f"--address={HERE}:6379", *node, f"--node-ip-address={THERE}",
                '--resources={"decode_host": 1}', log="node")
    hosts.wait_for("node", "This command will now block")
    (hosts.folder / "two.toml").write_text(CONFIG)
    serve = hosts.start(0, COMMAND, "serve", "--config", str(hosts.folder / "two.toml"), "--set",
                        f"ray.log_dir={hosts.folder}/logs", log="serve")
    url = hosts.wait_for("serve", r"ready at (http://\S+);")[1]

    status = hosts.run(1, COMMAND, "status", "--url", url)
    lines = {line.split()[0]: line for line in status.stdout.splitlines() if "-0 " in line}
    assert f" {HERE}:" in lines["prefill-0"], status.stdout
    assert f" {THERE}:" in lines["decode-0"], status.stdout
    said = hosts.run(1, COMMAND, "chat", "What is in row 2, column 3?", "--image", str(PICTURE), "--url", url)
    assert said.stdout == "A purple triangle.\n", said.stderr

    serve.send_signal(signal.SIGTERM)
    assert serve.wait(60) == 0, (hosts.folder / "serve").read_text()
