"""The client's wheel, installed alone in a fresh environment, against a split deployment with two routers."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream_client import AsyncClient, ChatRequest, Image, Message, Sampling, UnavailableError
from tests.support.cluster import Cluster
from tests.support.samples import FOLDER
from tests.support.worker_client import pair

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "client" / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
ROWS = [json.loads(line) for line in (FOLDER / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("client"))
    workers = cluster.start_workers("prefill", "decode")
    for _ in range(2):
        cluster.start_router(workers)
    yield cluster
    complaints = [line for running in cluster.processes.values() for line in running.complaints()]
    assert set(cluster.close().values()) == {0}
    assert not complaints


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment that holds the client's wheel and what pip brings for it."""
    folder = tmp_path_factory.mktemp("alone")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=ROOT / "client")
    (wheel,) = folder.glob("*.whl")
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder / "env")
    made = folder / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", str(made), "install", "--quiet", "--disable-pip-version-check",
        "--constraint", str(ROOT / "constraints.txt"), str(wheel), cwd=folder)
    return made


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def conversation(row: dict[str, Any]) -> list[Message]:
    """A sample's messages, its pictures as they lie on disk."""
    def part(given: Any) -> str | Image:
        return Image((FOLDER / given["image"]).read_bytes()) if given["type"] == "image" else str(given["text"])

    return [Message(one["role"], [one["content"]] if isinstance(one["content"], str) else list(map(part, one["content"])))
            for one in row["messages"]]


def greedy(row: dict[str, Any]) -> ChatRequest:
    return ChatRequest(conversation(row), sampling=Sampling(temperature=0))


def test_the_wheel_holds_the_client_and_needs_little(python: Path) -> None:
    code = ("import importlib.metadata as m, pathlib, slipstream_client as c, sys; folder = pathlib.Path(c.__file__).parent;"
            "print(c.__version__, m.version('slipstream-client'), (folder / 'py.typed').exists());"
            "print(*sorted(one.metadata['Name'].lower() for one in m.distributions()));"
            "print(*[n for n in ('slipstream', 'router', 'google.rpc', 'numpy') if n in sys.modules])")
    versions, names, others = run(str(python), "-I", "-c", code, cwd=python.parent).splitlines()
    assert versions == f"{slipstream.__version__} {slipstream.__version__} True", "in step with the product"
    assert set(names.replace("_", "-").split()) == {"grpcio", "protobuf", "slipstream-client", "typing-extensions"}
    assert others == ""


@pytest.mark.parametrize("example", EXAMPLES, ids=re.findall(r"^## (.*)\n\n```python|^```python", README, re.MULTILINE))
def test_examples(cluster: Cluster, python: Path, tmp_path: Path, example: str) -> None:
    routers = [cluster.processes[f"router-{i}"].grpc for i in range(2)]
    shutil.copy(next(FOLDER.glob("*.png")), tmp_path / "picture.png")
    code = example.replace("127.0.0.1:9000", routers[0]).replace("127.0.0.1:9001", routers[1])
    assert code != example
    assert run(str(python), "-I", "-c", code, cwd=tmp_path).strip()


def test_there_are_examples_of_everything() -> None:
    assert len(EXAMPLES) == 7
    for name in ("Client", "AsyncClient", "stream_chat", "generate", "tokenize", "models", "load", "Image", "Retry"):
        assert any(name in one for one in EXAMPLES), name


async def test_samples(cluster: Cluster) -> None:
    """Text and pictures by both routers; then one of them is killed in the middle of it."""
    rows, room = ROWS[::2], asyncio.Semaphore(4)
    routers = [cluster.processes[f"router-{i}"] for i in range(2)]
    assert any("image" in json.dumps(row["messages"]) for row in rows)
    async with AsyncClient([one.grpc for one in routers], timeout=60) as client, pair(
            cluster.processes["prefill-0"].address, cluster.processes["decode-0"].address) as workers:
        begun = 0

        async def ask(row: dict[str, Any], kill_at: int = 0) -> tuple[str, bool]:
            """(text, whether it is complete)."""
            nonlocal begun
            async with room, client.stream_chat(greedy(row)) as stream:
                try:
                    async for _ in stream:
                        begun += 1
                        if begun == kill_at:
                            cluster.kill(routers[0])
                    return (await stream.answer()).text.strip(), True
                except UnavailableError:
                    assert stream.text(), "a request of which nothing had come goes on elsewhere"
                    return stream.text().strip(), False

        answers = await asyncio.gather(*map(ask, rows))
        assert answers == [(row["answer"].strip(), True) for row in rows]
        answers = await asyncio.gather(*(ask(row, begun + 20) for row in rows))
        assert all(row["answer"].strip().startswith(text) for row, (text, _) in zip(rows, answers, strict=True))
        assert sum(complete for _, complete in answers) >= len(rows) - 4
        assert all(text == row["answer"].strip() for row, (text, complete) in zip(rows, answers, strict=True) if complete)
        assert routers[0].child.wait(0) is not None
        await workers.until_empty()
