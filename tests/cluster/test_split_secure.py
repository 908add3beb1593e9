"""A split deployment whose processes prove themselves by token and by certificate, one replica of two ranks among them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from slipstream import config
from slipstream.rpc import security
from slipstream.rpc.channel import connect_blocking
from tests.support.certificates import Authority, overrides, token_file
from tests.support.cluster import Cluster, Running

SECONDS = 20.0
Secured = tuple[Cluster, list[str], Path]


@pytest.fixture(scope="module", params=["token", "mtls and token"])
def secured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """The cluster, its `[security]`, and a folder of files."""
    folder = tmp_path_factory.mktemp("secure")
    keys = {"token_file": str(token_file(folder))}
    if request.param != "token":
        keys |= Authority(folder).settings()
    cluster = Cluster(folder)
    cluster.start_workers("prefill", overrides=overrides(**keys))
    if request.param == "token":
        cluster.start_workers("decode", overrides=overrides(**keys))
    else:
        cluster.start_gang("decode", 2, 1, overrides(**keys))
    yield cluster, overrides(**keys), folder
    complaints = [line for running in cluster.processes.values() for line in running.complaints()]
    assert set(cluster.close().values()) == {0}
    assert not complaints


def workers(cluster: Cluster) -> list[Running]:
    return [cluster.processes["prefill-0"], cluster.processes["decode-0"]]


def test_those_who_belong_answer_together(secured: Secured) -> None:
    cluster, own, _ = secured
    router = cluster.start_router(workers(cluster), own)
    with httpx.Client(base_url=f"http://{router.address}", timeout=SECONDS) as client:
        until(client, "")
        body = {"model": client.get("/v1/models").json()["data"][0]["id"], "prompt": "Two and two are", "max_tokens": 8}
        answer = client.post("/v1/completions", json=body)
        told = client.get("/status?detail=transfers").json()["replicas"]
    assert [one["silent_ranks"] for one in told] == [[], []], "rank 0 proves itself to the other ranks, too"
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0
    assert cluster.stop(router) == 0


def test_every_rank_asks_for_the_token(secured: Secured) -> None:
    cluster, own, _ = secured
    trusted = security.load(config.load(None, own).security)
    for running in cluster.processes.values():
        with connect_blocking(running.address, trusted) as channel:
            ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/slipstream.worker.v1.Worker/Inspect")
            ask(b"", metadata=trusted.metadata, timeout=SECONDS)
            with pytest.raises(grpc.RpcError) as refused:
                ask(b"", timeout=SECONDS)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, running.name


def test_a_router_that_is_refused_says_so_in_its_health_its_status_and_its_log(secured: Secured) -> None:
    cluster, own, folder = secured
    other = [f"security.token_file={token_file(folder, 'the-token-of-another-deployment')}"]
    strange = own + other
    words = "security.token_file"
    if any("tls_cert" in one for one in own):
        strange, words = overrides(**Authority(folder, "other").settings()) + other, "CERTIFICATE_VERIFY_FAILED"
    router = cluster.start_router(workers(cluster), strange)
    with httpx.Client(base_url=f"http://{router.address}", timeout=SECONDS) as client:
        until(client, words)
        deadline = time.monotonic() + 5
        while not all(words in one["problem"] for one in client.get("/status").json()["replicas"]):
            assert time.monotonic() < deadline, "each of them is refused for this reason"
            time.sleep(0.05)
        started = time.monotonic()
        assert client.post("/v1/completions", json={"model": "demo", "prompt": "x"}).status_code == 503
        assert time.monotonic() - started < 5
    told = [line["message"] for line in router.log() if "cannot be used" in line["message"]]
    assert len(told) == 2, "once for each worker, however often it asks"
    assert all(words in one for one in told)
    assert cluster.stop(router) == 0


def until(client: httpx.Client, problem: str) -> None:
    """Until the router's health names it; empty: until it is well."""
    deadline = time.monotonic() + 5
    while True:
        said = client.get("/health").json()["problem"]
        if problem in said if problem else not said:
            return
        assert time.monotonic() < deadline, said
        time.sleep(0.05)
