"""`slipstream serve`, `status` and `chat`: a deployment's life from start to drain, a lost worker, and a lost launcher."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream.checkpoint import DEMO
from slipstream_client import ChatRequest, Client, Retry, Sampling, user
from tests.support.command import COMMAND, Command

pytestmark = pytest.mark.deployment

ROOT = Path(__file__).resolve().parents[2]
SERVE = ["serve", "--config", str(ROOT / "deploy" / "examples" / "local.toml"), "--set", "router.port=0"]
READY = r"ready at (http://\S+);"


@pytest.fixture
def start() -> Iterator[Callable[..., Command]]:
    made: list[Command] = []

    def run(*arguments: str) -> Command:
        made.append(Command([*SERVE, *arguments]))
        return made[-1]

    yield run
    for one in made:
        one.clean_up()


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=60)


def metrics(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines) if not name.startswith("#")}


def replicas(url: str) -> dict[str, dict[str, object]]:
    listed = json.loads(ask("status", "--json", "--url", url).stdout)["replicas"]
    return {one["replica_id"]: one for one in listed}


@pytest.mark.timeout(240)
def test_a_deployment_from_start_to_drain(start: Callable[..., Command]) -> None:
    served = start("--set", "ray.unresponsive_seconds=8")
    url = served.wait_for(READY)[1]

    shown = ask("status", "--url", url)
    assert shown.returncode == 0
    assert "healthy" in shown.stdout
    assert {line.split()[0] for line in shown.stdout.splitlines()[2:]} == {"prefill-0", "decode-0"}
    address = re.search(r"; gRPC at (\S+)", shown.stdout)
    assert address is not None
    assert address[1] == served.wait_for(r"router-0 serves at \S+ \(pid \d+, gRPC at (\S+),")[1]
    client = Client(address[1], timeout=90, retry=Retry(attempts=100))
    request = ChatRequest([user("Count 3 to 5.")], sampling=Sampling(temperature=0))
    assert client.chat(request).text == "3, 4, 5."

    said = ask("chat", "What city is the capital of Norway?", "--url", url)
    assert (said.returncode, said.stdout) == (0, "The capital of Norway is Oslo.\n"), said.stderr
    picture = ROOT / "tests" / "samples" / "img_lookup-0-0.png"
    said = ask("chat", "What is in row 2, column 3?", "--image", str(picture), "--url", url)
    assert (said.returncode, said.stdout) == (0, "A purple triangle.\n"), said.stderr

    before = replicas(url)
    os.kill(int(str(before["decode-0"]["pid"])), signal.SIGKILL)
    deadline = time.monotonic() + 30
    while (row := replicas(url).get("decode-0", {})).get("state") != "restarting":
        assert time.monotonic() < deadline, row
    assert (row["epoch"], row["problem"]) == (2, "ended with signal SIGKILL")
    os.kill(int(served.wait_for(r"router-0 serves at \S+ \(pid (\d+)")[1]), signal.SIGKILL)
    os.kill(int(str(before["prefill-0"]["pid"])), signal.SIGSTOP)
    deadline = time.monotonic() + 90
    served.wait_for("prefill-0 has not answered for 8 s; killing it")
    for name in ("decode-0", "prefill-0", "router-0"):
        served.wait_for(f"(?s){name} ended with signal SIGKILL; starting epoch 2.*{name} serves at")
    while ask("chat", "Count 3 to 5.", "--url", url).stdout != "3, 4, 5.\n":
        assert time.monotonic() < deadline, "the router, at its old address, did not find the new replicas"
    assert client.chat(request).text == "3, 4, 5.", "the router's gRPC, at its old address"
    client.close()
    after = replicas(url)
    assert {(before[name]["epoch"], after[name]["epoch"]) for name in ("prefill-0", "decode-0")} == {(1, 2)}

    counted = metrics(served.wait_for(r"metrics: http://(\S+)/metrics")[1])
    restarts = {key: value for key, value in counted.items() if "restarts_total" in key and value}
    assert restarts == {f'slipstream_supervisor_restarts_total{{reason="{reason}",role="{role}"}}': 1 for role, reason in
                        [("prefill", "unresponsive"), ("decode", "ended"), ("router", "ended")]}
    assert {counted[f'slipstream_supervisor_replicas_serving{{role="{role}"}}'] for role in ("prefill", "router")} == {1}

    long = subprocess.Popen([COMMAND, "chat", "Count 113 to 142.", "--url", url], stdout=subprocess.PIPE, text=True)
    assert long.stdout is not None
    begun = long.stdout.read(3)
    served.signal(signal.SIGTERM)
    assert begun + long.stdout.read() == ", ".join(map(str, range(113, 143))) + ".\n"
    assert served.wait() == 0, served.text
    assert served.leftovers() == re.findall(r"logs: (\S+)$", served.text, re.MULTILINE), "the logs say why three were restarted"


@pytest.mark.long
@pytest.mark.timeout(240)
def test_no_process_outlives_a_launcher_that_was_killed(start: Callable[..., Command]) -> None:
    served = start()
    served.wait_for(READY)
    assert len([line for line in served.processes() if re.search(r"-m (prefill|decode|router) ", line)]) == 3
    served.signal(signal.SIGKILL)
    served.wait()
    deadline = time.monotonic() + 30
    # Ray's own helpers look for their parent only now and then; ours are tied to it.
    while left := [line for line in served.processes() if re.search(r"-m (prefill|decode|router) ", line)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.timeout(120)
def test_a_stop_during_the_start_leaves_nothing(start: Callable[..., Command]) -> None:
    served = start()
    served.wait_for("starting Ray")
    served.signal(signal.SIGTERM)
    assert served.wait() == 0, served.text
    assert served.leftovers() == []


def test_what_cannot_be_placed_is_named(start: Callable[..., Command]) -> None:
    served = start("--set", "ray.cpus=2", "--set", "pools.decode.cpus=3")
    assert served.wait(30) == 1
    assert "no node is large enough for decode-0, which needs CPU 3" in served.text
    assert "Traceback" not in served.text
    assert served.leftovers() == []


def test_gpus_that_this_machine_lacks_are_named(start: Callable[..., Command]) -> None:
    served = start("--set", "pools.decode.gpus=64")
    assert served.wait(60) == 1
    assert "decode-0 needs GPU 64 (pools.decode.gpus), but this machine has" in served.text
    assert "starting Ray" not in served.text
    assert served.leftovers() == []


def test_a_wrong_model_is_found_before_anything_starts() -> None:
    done = ask("serve", "--model", "/nowhere/at/all")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("slipstream: /nowhere/at/all is no folder; give model.path a checkpoint folder")


def test_a_wrong_key_ends_with_status_2_and_one_line() -> None:
    done = ask("serve", "--set", "engine.blok_size=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "slipstream: unknown key engine.blok_size in the overrides; did you mean engine.block_size?\n"


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_process_that_cannot_start_ends_the_deployment_and_shows_its_log(start: Callable[..., Command],
                                                                           tmp_path: Path) -> None:
    folder = tmp_path / "no-weights"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    served = start("--set", f"model.path={folder}")
    assert served.wait() == 1, served.text
    assert "before it was ready; the end of" in served.text
    assert "no-weights holds neither model.safetensors nor" in served.text
    assert "Traceback" not in served.text
    assert served.processes() == []
