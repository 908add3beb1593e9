"""A router's life: workers that come, go, drain or do not fit; overload; the stop signal."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest

from launch.child import ChildProcess
from slipstream.checkpoint import DEMO
from slipstream.errors import LaunchError
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import Role
from slipstream.v1 import directory_pb2, worker_pb2
from tests.support.fake_workers import Plan
from tests.support.scripted_router import Front, Later
from tests.support.scripted_workers import Stage

LONG = tuple(Tokenizer(DEMO).encode("The quick brown fox jumps over the lazy dog, and a purple triangle is in row two."))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def replicas(router: Front) -> list[dict[str, object]]:
    with router.client() as client:
        result: list[dict[str, object]] = client.get("/status").json()["replicas"]
        return result


# Who is there ----------------------------------------------------------------------------------------------------------


def test_roles_that_are_missing_are_named_and_may_come_later(router: Front, stage: Stage) -> None:
    prefill, decode = free_port(), free_port()
    router.start([f"127.0.0.1:{prefill}", f"127.0.0.1:{decode}"])
    body = str(router.until_healthy(503))
    assert "prefill" in body
    assert "decode" in body
    with router.client() as client:
        assert client.get("/live").status_code == 200
        assert client.get("/v1/models").status_code == 200
    stage.worker(Role.PREFILL, f"127.0.0.1:{prefill}")
    stage.until(lambda: "prefill" not in str(router.until_healthy(503)), "prefill is connected", 10)
    reply = router.chat()
    assert reply.status_code == 503
    assert "decode" in reply.json()["error"]["message"]
    assert int(reply.headers["retry-after"]) >= 1
    stage.worker(Role.DECODE, f"127.0.0.1:{decode}")
    router.until_healthy()
    router.answer("ok")
    assert router.chat().status_code == 200


def test_status(router: Front, stage: Stage) -> None:
    workers = [stage.worker(role) for role in Role]
    router.start([worker.address for worker in workers])
    router.until_healthy()
    shown = {one["replica_id"]: one for one in replicas(router)}
    assert set(shown) == {"prefill-0", "decode-0"}
    for worker in workers:
        one = shown[worker.info.replica_id]
        assert (one["role"], one["address"], one["state"], one["epoch"], one["pid"]) == (
            worker.role.value,
            worker.address,
            "ready",
            1,
            1,
        )
        assert (one["model"], one["dtype"], one["compatibility_hash"]) == ("demo_model", "float32", "same")
        assert one["load"]["free_blocks"] == 4096  # type: ignore[index]


def test_status_with_the_insides_of_workers_names_the_one_that_does_not_answer(router: Front, stage: Stage) -> None:
    prefill, decode = (stage.worker(role) for role in Role)
    router.start([prefill.address, decode.address, f"127.0.0.1:{free_port()}"])
    router.until_healthy()
    decode.silent = True
    with router.client() as client:
        shown = {one["replica_id"]: one for one in client.get("/status?detail=1").json()["replicas"]}
        assert not any("kernels" in one or "holdings" in one for one in client.get("/status?detail=0").json()["replicas"])
    assert shown["prefill-0"]["kernels"] == [{"op": "attention", "implementation": "script", "reason": "a fake"}]
    assert shown["prefill-0"]["holdings"] == [{"owner": "free", "request_id": "", "blocks": 4096, "state_slots": 64}]
    assert shown["decode-0"]["inspect_problem"] == "it does not answer"
    assert shown[""]["state"] == "disconnected"


def test_sides_without_a_channel_in_common_are_told_at_once(router: Front, stage: Stage) -> None:
    workers = [stage.worker(Role.PREFILL, channels=["rdma/nixl"]),
               stage.worker(Role.DECODE, channels=["local", "rdma/mooncake"])]
    router.start([worker.address for worker in workers])
    stage.until(lambda: all(one["state"] == "ready" for one in replicas(router)), "both are connected", 10)
    says = "prefill offers the channels rdma/nixl, decode local, rdma/mooncake; set transfer.channel and transfer.rdma.engine"
    assert says in str(router.until_healthy(503))
    assert says in router.chat().text
    assert [one["channels"] for one in replicas(router)] == [["rdma/nixl"], ["local", "rdma/mooncake"]]


def test_hashes_must_be_equal(router: Front, stage: Stage) -> None:
    ours = [
        stage.worker(Role.PREFILL, compatibility_hash="a"),
        stage.worker(Role.DECODE, compatibility_hash="b", replica_id="decode-0"),
    ]
    other = stage.worker(Role.PREFILL, compatibility_hash="b", replica_id="prefill-1")
    router.start([worker.address for worker in ours])
    stage.until(lambda: all(one["state"] == "ready" for one in replicas(router)), "both are connected", 10)
    assert "hashes differ, a at prefill and b at decode" in str(router.until_healthy(503))
    answer = router.chat()
    assert answer.status_code == 503
    assert "soon" not in answer.text
    router.start([worker.address for worker in (*ours, other)])
    router.until_healthy()
    for _ in range(4):
        router.answer("ok")
        assert router.chat().status_code == 200
        assert stage.last.workers[Role.PREFILL] == ["prefill-1"]


def test_a_worker_of_another_model_is_not_used(router: Front, stage: Stage) -> None:
    workers = [stage.worker(role, model_name="something-else") for role in Role]
    router.start([worker.address for worker in workers])
    stage.until(lambda: "something-else" in str(router.until_healthy(503)), "both were asked what they serve", 10)
    assert router.chat().status_code == 503


def test_the_smallest_context_of_the_workers_counts(router: Front, stage: Stage) -> None:
    workers = [stage.worker(Role.PREFILL, max_context=500), stage.worker(Role.DECODE, max_context=400)]
    router.start([worker.address for worker in workers])
    router.until_healthy()
    with router.client() as client:
        assert 400 in client.get("/v1/models").json()["data"][0].values()
    reply = router.post("/v1/completions", {"model": "demo_model", "prompt": [100] * 390, "max_tokens": 11})
    assert reply.status_code == 400
    assert "400" in reply.json()["error"]["message"]
    router.answer("ok")
    assert router.post("/v1/completions", {"model": "demo_model", "prompt": [100] * 390}).status_code == 200
    assert stage.last.submits[Role.DECODE][0].max_tokens == 10


def test_choices_share_the_room_of_a_decode_replica(router: Front, stage: Stage) -> None:
    workers = [stage.worker(Role.PREFILL), stage.worker(Role.DECODE, total_blocks=100, block_size=16)]
    router.start([worker.address for worker in workers])
    router.until_healthy()
    router.answer("ok")
    asked = {"model": "demo_model", "prompt": [100] * 170, "n": 3}
    assert router.post("/v1/completions", asked).status_code == 200
    # 100 blocks: ten whole ones of the prompt, and thirty more for each choice.
    assert stage.last.submits[Role.DECODE][0].max_tokens == (10 + 30) * 16 - 170
    router.answer("ok")
    answer = router.post("/v1/completions", {**asked, "max_tokens": 1000})
    assert answer.status_code == 200, "a replica judges what is asked for"
    assert stage.last.submits[Role.DECODE][0].max_tokens == 1000


def test_load_is_spread(router: Front, stage: Stage) -> None:
    workers = [stage.worker(role, replica_id=f"{role.value}-{number}") for role in Role for number in range(2)]
    router.start([worker.address for worker in workers])
    stage.until(lambda: all(worker.connected for worker in workers), "all are connected", 10)
    router.until_healthy()
    stage.default = Plan(tokens=LONG, hold_at=1)
    asked = [Later(router.chat) for _ in range(8)]
    stage.until(lambda: len(stage.seen) == 8 and all(seen.held.is_set() for seen in stage.seen.values()), "all are held")
    assert [len(worker.submits) for worker in workers] == [4, 4, 4, 4]
    for seen in list(stage.seen.values()):
        stage.release(seen)
    assert all(one.result().status_code == 200 for one in asked)


def test_a_draining_worker_gets_nothing_new_and_finishes(router: Front, stage: Stage) -> None:
    workers = [stage.worker(role) for role in Role]
    router.start([worker.address for worker in workers])
    router.until_healthy()
    stage.next(Plan(tokens=LONG, hold_at=4))
    asked = Later(router.chat)
    seen = router.held()
    stage.do(workers[1].drain)
    assert "decode" in str(router.until_healthy(503))
    reply = router.chat()
    assert (reply.status_code, "decode" in reply.json()["error"]["message"]) == (503, True)
    assert [one["state"] for one in replicas(router) if one["role"] == "decode"] == ["draining"]
    stage.release(seen)
    assert asked.result().status_code == 200


@pytest.mark.parametrize("role", list(Role))
def test_directory(router: Front, stage: Stage, role: Role) -> None:
    directory = stage.directory()
    workers = {each: stage.worker(each) for each in Role}
    stage.do(lambda: directory.show(*workers.values()))
    router.start([], directory=directory.address)
    router.until_healthy()
    stage.next(Plan(tokens=LONG, hold_at=0))
    asked = Later(router.chat)
    seen = router.held()
    name = f"{role.value}-1"
    workers[role] = stage.worker(role, replica_id=name)
    stage.do(lambda: directory.show(*workers.values()))
    stage.until(
        lambda: (
            [one["replica_id"] for one in replicas(router) if one["state"] == "ready" and one["role"] == role.value] == [name]
        ),
        "the new worker is connected",
        10,
    )
    router.answer("ok")
    assert router.chat().status_code == 200
    assert stage.last.workers[role] == [name]
    stage.release(seen)
    assert asked.result().status_code == 200, "a worker that leaves the directory may finish"
    stage.until(lambda: len(replicas(router)) == 2, "it is forgotten then")
    stage.stop(directory)
    router.answer("still")
    assert router.chat().status_code == 200, "known workers serve on without the directory"


def test_a_worker_that_leaves_the_directory_is_forgotten(router: Front, stage: Stage) -> None:
    directory = stage.directory()
    workers = [stage.worker(role) for role in Role]
    stage.do(lambda: directory.show(*workers))
    router.start([], directory=directory.address)
    router.until_healthy()
    stage.do(lambda: directory.show(workers[0]))
    router.until_healthy(503)
    stage.until(lambda: len(replicas(router)) == 1, "forgotten", 5)
    stage.do(lambda: directory.show(*workers))
    router.until_healthy()
    router.answer("ok")
    assert router.chat().status_code == 200


def test_a_lost_worker_keeps_its_name_and_one_that_restarts_is_shown(router: Front, stage: Stage) -> None:
    directory = stage.directory()
    workers = [stage.worker(role) for role in Role]
    stage.do(lambda: directory.show(*workers))
    router.start([], directory=directory.address)
    router.until_healthy()
    stage.stop(workers[1])

    def decode() -> dict[str, object]:
        return next(one for one in replicas(router) if one["replica_id"] == "decode-0")

    stage.until(lambda: decode()["state"] == "disconnected", "its loss is seen", 5)
    lost = decode()
    assert (lost["replica_id"], lost["role"], lost["epoch"]) == ("decode-0", "decode", 1)
    assert lost["problem"] in ("the connection was lost", "nothing listens there", "it does not answer")
    told = directory_pb2.Endpoint(replica_id="decode-0", role=worker_pb2.ROLE_DECODE, epoch=2, problem="ended with status 1")
    stage.do(lambda: directory.show(workers[0], restarting=[told]))
    stage.until(lambda: decode()["state"] == "restarting", "its restart is shown", 5)
    assert decode() == {"replica_id": "decode-0", "role": "decode", "state": "restarting", "epoch": 2,
                        "problem": "ended with status 1"}
    assert len(replicas(router)) == 2
    assert "decode-0 is restarting: ended with status 1" in str(router.until_healthy(503))


def test_two_workers_of_one_name_are_not_both_used(router: Front, stage: Stage) -> None:
    workers = [stage.worker(role) for role in Role]
    router.start([worker.address for worker in workers])
    router.until_healthy()
    twin = stage.worker(Role.DECODE)
    router.start([*(worker.address for worker in workers), twin.address])
    router.until_healthy()
    stage.until(lambda: any("called decode-0 too" in str(one.get("problem")) for one in replicas(router)), "refused", 5)
    assert len([one for one in replicas(router) if one["state"] == "ready"]) == 2


# Overload and stop -----------------------------------------------------------------------------------------------------


def test_overload(router: Front, stage: Stage) -> None:
    workers = [stage.worker(role) for role in Role]
    router.start([worker.address for worker in workers], "router.max_in_flight=4", "router.max_waiting=0")
    router.until_healthy()
    stage.default = Plan(tokens=LONG, hold_at=1)
    asked = [Later(router.chat) for _ in range(12)]
    stage.until(lambda: len(stage.seen) == 4 and all(seen.held.is_set() for seen in stage.seen.values()), "four are held")
    with router.client() as client:
        stage.until(
            lambda: (
                'slipstream_router_requests_total{code="429",route="/v1/chat/completions"} 8.0' in client.get("/metrics").text
            ),
            "eight are refused",
        )
        assert client.get("/health").status_code == 200, "busy is not ill"
    for seen in list(stage.seen.values()):
        stage.release(seen)
    replies = [one.result() for one in asked]
    assert sorted(reply.status_code for reply in replies) == [200] * 4 + [429] * 8
    for reply in replies:
        if reply.status_code == 429:
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["type"] == "rate_limit_error"


def test_stop_drains(router: Front, stage: Stage) -> None:
    workers = [stage.worker(role) for role in Role]
    child = router.start([worker.address for worker in workers])
    router.until_healthy()
    stage.next(Plan(tokens=LONG, hold_at=4))
    asked = Later(router.stream)
    seen = router.held()
    os.kill(child.pid, signal.SIGTERM)
    router.until_healthy(503)
    refused = router.chat()
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    with router.client() as client:
        assert client.get("/live").status_code == 200
    stage.release(seen)
    answer = asked.result()
    assert answer.text == router.tokenizer.decode(LONG)
    assert answer.events[-1] == "[DONE]"
    started = time.monotonic()
    assert child.wait() == 0
    assert time.monotonic() - started < 4


def test_stop_cuts_off_what_does_not_end(router: Front, stage: Stage) -> None:
    workers = [stage.worker(role) for role in Role]
    child = router.start([worker.address for worker in workers], "router.drain_seconds=0.5")
    router.until_healthy()
    stage.next(Plan(tokens=LONG, hold_at=4))
    stage.next(Plan(tokens=LONG, hold_at=4))
    streamed = Later(router.stream)
    router.held()
    whole = Later(router.chat)
    stage.until(lambda: len(stage.seen) == 2 and stage.last.held.is_set(), "both are held")
    started = time.monotonic()
    os.kill(child.pid, signal.SIGTERM)
    assert child.wait() == 0
    assert time.monotonic() - started < 5
    answer = streamed.result()
    assert (len(answer.errors), answer.reasons, answer.events[-1] == "[DONE]") == (1, [], False)
    assert whole.result().status_code == 503
    for seen in stage.seen.values():
        stage.until(lambda seen=seen: bool(seen.cancels[Role.DECODE]), "decode is told")  # type: ignore[misc]


def test_idle_stop_is_quick(router: Front, stage: Stage) -> None:
    workers = [stage.worker(role) for role in Role]
    child = router.start([worker.address for worker in workers])
    router.until_healthy()
    with router.client() as client:
        client.get("/health")  # an idle connection that stays open
        started = time.monotonic()
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait() == 0
        assert time.monotonic() - started < 2
    with pytest.raises(httpx.TransportError):
        router.chat()


def test_a_taken_port_is_named(stage: Stage, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        one = Front(stage, tmp_path)
        with pytest.raises(LaunchError) as caught:
            one.start([], f"router.port={taken.getsockname()[1]}")
        assert "router.port" in str(caught.value)
        assert str(taken.getsockname()[1]) in str(caught.value)
        assert isinstance(one._started[0], ChildProcess)
        assert one.close() == [2]
