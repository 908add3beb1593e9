"""The public gRPC API of a real router process in front of scripted workers, as any client of gRPC sees it."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]

from router.inference import SERVICE
from slipstream.errors import LaunchError
from slipstream.types import Role
from slipstream.v1 import worker_pb2
from slipstream_client.v1 import inference_pb2 as pb
from tests.support.certificates import TOKEN, token_file
from tests.support.fake_workers import Plan
from tests.support.inference import REPLIES, Stub, chat, refused, text
from tests.support.scripted_router import CHECKPOINT, CONTEXT, MODEL, REFUSING, SECRET, Front, front, picture

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("router"), *REFUSING, "router.unread_bytes=4000", "router.max_in_flight=4",
               "router.max_waiting=0", "router.request_timeout_seconds=15") as one:
        yield one


@pytest.fixture
def stub(router: Front) -> Iterator[Stub]:
    """After each test nothing is in flight, and the next request works."""
    router.stage.forget()
    made = Stub(router)
    yield made
    router.stage.plans.clear()
    router.until_idle()
    router.answer("fine")
    assert text(made.read("Chat", chat())) == "fine"
    made.channel.close()


# Answers ---------------------------------------------------------------------------------------------------------------


def test_a_chat(router: Front, stub: Stub) -> None:
    tokens = router.answer("A purple triangle, 🙂 紫の三角.")
    call = stub("Chat", chat("What?"), metadata=(("x-request-id", "mine"),))
    assert dict(call.initial_metadata())["x-request-id"] == "mine"
    messages = list(call)
    assert text(messages) == "A purple triangle, 🙂 紫の三角."
    assert [bool(one.HasField("usage")) for one in messages] == [False] * (len(messages) - 1) + [True]
    assert messages[-1].usage.completion_tokens == len(tokens)
    assert messages[-1].usage.prompt_tokens == len(router.stage.last.submits[Role.PREFILL][0].tokens)
    assert [delta.finish_reason for one in messages for delta in one.deltas if delta.finish_reason] == [pb.FINISH_REASON_STOP]
    assert router.stage.last.submits[Role.PREFILL][0].request_id.startswith("mine-req-")


def test_both_apis_ask_the_workers_for_the_same(router: Front, stub: Stub) -> None:
    router.answer("x")
    said = [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]
    router.chat(said, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=-3, presence_penalty=0.5, frequency_penalty=-0.5,
                repetition_penalty=1.1, logit_bias={"7": 2.5}, max_tokens=9, stop=["zz"], stop_token_ids=[9, 8], min_tokens=1,
                n=2, logprobs=True, top_logprobs=3, priority=-4, cache_salt="s")
    router.answer("x")
    stub.read("Chat", chat(
        "hello", "there", n=2, logprobs=3, priority=-4, cache_salt="s",
        sampling=pb.Sampling(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=-3, presence_penalty=0.5,
                             frequency_penalty=-0.5, repetition_penalty=1.1, logit_bias={7: 2.5}),
        stop=pb.Stop(max_tokens=9, strings=["zz"], token_ids=[9, 8], min_tokens=1)))
    one, two = (seen.submits[Role.DECODE][0] for seen in list(router.stage.seen.values())[-2:])
    for submit in (one, two):
        for name in ("handle", "request_id", "transfer_id", "remaining_ms"):
            submit.ClearField(name)
    assert one == two


def test_a_prompt_of_ids_with_choices_and_logprobs(router: Front, stub: Stub) -> None:
    router.answer("abc", others=((100, 101, 1913),))
    messages = stub.read("Generate", pb.GenerateRequest(tokens=pb.TokenIds(ids=[100, 101, 102]), n=2, logprobs=20))
    assert text(messages) == "abc"
    assert text(messages, 1) == router.tokenizer.decode([100, 101])
    assert list(router.stage.last.submits[Role.PREFILL][0].tokens) == [100, 101, 102]
    rows = [row for one in messages for delta in one.deltas if delta.choice == 1 for row in delta.logprobs]
    assert [row.token.token for row in rows] == [100, 101]
    assert {len(row.top) for row in rows} == {20}
    assert b"".join(row.token.text for row in rows).decode(errors="replace") == router.tokenizer.decode([100, 101])
    assert messages[-1].usage.prompt_tokens == 3


def test_pictures_as_bytes_and_as_urls(router: Front, stub: Stub) -> None:
    url = picture(64, 64)["image_url"]["url"]
    data = base64.b64decode(url.partition(",")[2])
    hashes = []
    for image in (pb.Image(data=data), pb.Image(url=url)):
        router.answer("red")
        assert text(stub.read("Chat", chat(pb.Part(image=image), "What?"))) == "red"
        hashes += [bytes(one.content_hash) for one in router.stage.last.submits[Role.PREFILL][0].images]
    assert len(hashes) == 2
    assert len(set(hashes)) == 1
    router.answer("clip")
    clip = pb.Video(frames=[pb.Image(data=data)] * 4, timestamps=pb.Timestamps(seconds=[0, 1, 2, 4.5]))
    assert text(stub.read("Chat", chat(pb.Part(video=clip), "What?"))) == "clip"
    assert len(router.stage.last.submits[Role.PREFILL][0].images) == 2


def test_tokenize_models_and_load(router: Front, stub: Stub) -> None:
    assert list(stub("Tokenize", pb.TokenizeRequest(text="hello")).tokens) == router.tokenizer.encode("hello")
    router.answer("x")
    stub.read("Chat", chat("hello"))
    conversation = pb.Conversation(messages=chat("hello").messages)
    reply = stub("Tokenize", pb.TokenizeRequest(conversation=conversation))
    assert list(reply.tokens) == list(router.stage.last.submits[Role.PREFILL][0].tokens)
    assert reply.max_context == CONTEXT
    (model,) = stub("ListModels", pb.ListModelsRequest()).models
    assert (model.id, model.max_context, model.takes_images, model.takes_videos) == (MODEL, CONTEXT, True, True)
    load = stub("GetLoad", pb.GetLoadRequest())
    assert (load.problem, load.in_flight, load.max_in_flight) == ("", 0, 4)
    assert {one.role: (one.state, one.total_blocks > 0) for one in load.replicas} == {
        "prefill": ("ready", True), "decode": ("ready", True)}


# Refusals --------------------------------------------------------------------------------------------------------------

USER = pb.Message(role=pb.ROLE_USER, parts=[pb.Part(text=SECRET)])
WRONG: tuple[tuple[str, Any, str], ...] = (
    ("Chat", chat(sampling=pb.Sampling(temperature=float("nan"))), "sampling.temperature"),
    ("Chat", chat(sampling=pb.Sampling(top_p=0)), "sampling.top_p"),
    ("Chat", chat(sampling=pb.Sampling(logit_bias={1 << 31: 5})), "sampling.logit_bias"),
    ("Chat", chat(sampling=pb.Sampling(logit_bias={CHECKPOINT.vocab_size: 5})), "sampling.logit_bias"),
    ("Chat", chat(stop=pb.Stop(strings=["x"] * 5)), "stop.strings"),
    ("Chat", chat(stop=pb.Stop(strings=["x"] * 600_000)), "stop.strings"),
    ("Chat", chat(stop=pb.Stop(token_ids=[1] * 65)), "stop.token_ids"),
    ("Chat", chat(stop=pb.Stop(max_tokens=0)), "stop.max_tokens"),
    ("Chat", chat(stop=pb.Stop(max_tokens=5, min_tokens=6)), "stop.min_tokens"),
    ("Chat", chat(stop=pb.Stop(max_tokens=50_000)), "stop.max_tokens"),
    ("Chat", chat(n=17), "n"),
    ("Chat", chat(logprobs=21), "logprobs"),
    ("Chat", chat(priority=101), "priority"),
    ("Chat", chat(cache_salt="x" * 257), "cache_salt"),
    ("Chat", chat(messages=[]), "messages"),
    ("Chat", chat(messages=[USER] * 5000), "messages"),
    ("Chat", chat(messages=[USER, pb.Message(role=7, parts=[pb.Part(text="x")])]), "messages[1].role"),  # type: ignore[arg-type]
    ("Chat", chat(messages=[pb.Message(role=pb.ROLE_USER)]), "messages[0].parts"),
    ("Chat", chat("x", pb.Part()), "messages[0].parts[1]"),
    ("Chat", chat("x", pb.Part(image=pb.Image(data=b"no picture"))), "messages[0].parts[1]"),
    ("Chat", chat("x", pb.Part(image=pb.Image(url="http://169.254.169.254/x"))), "messages[0].parts[1]"),
    ("Chat", chat("x", pb.Part(video=pb.Video(frames=[pb.Image(data=b"x")]))), "messages[0].parts[1]"),
    ("Chat", chat(*[pb.Part(image=pb.Image(data=b"x"))] * 4), "messages"),
    ("Generate", pb.GenerateRequest(), "prompt"),
    ("Generate", pb.GenerateRequest(text=""), "prompt"),
    ("Generate", pb.GenerateRequest(text="x", logprobs=21), "logprobs"),
    ("Generate", pb.GenerateRequest(tokens=pb.TokenIds(ids=[CHECKPOINT.vocab_size])), "prompt"),
    ("Generate", pb.GenerateRequest(tokens=pb.TokenIds(ids=[1] * 600_000)), "tokens"),
    ("Generate", pb.GenerateRequest(tokens=pb.TokenIds(ids=[1] * CONTEXT)), "prompt"),
    ("Tokenize", pb.TokenizeRequest(), "prompt"),
    ("Tokenize", pb.TokenizeRequest(conversation=pb.Conversation()), "messages"),
)


@pytest.mark.parametrize(("name", "message", "field"), WRONG, ids=[f"{name}-{field}-{i}" for i, (name, _, field) in
                                                                   enumerate(WRONG)])
def test_a_wrong_field_is_named(router: Front, name: str, message: Any, field: str) -> None:
    stub = Stub(router)
    ask = stub.read if name != "Tokenize" else stub
    before = len(router.workers[Role.PREFILL].submits)
    _, details = refused(lambda: ask(name, message), grpc.StatusCode.INVALID_ARGUMENT)
    (violation,) = details["BadRequest"].field_violations
    assert violation.field == field
    assert violation.description
    assert "RetryInfo" not in details
    assert details["ErrorInfo"].reason in ("INVALID_REQUEST", "CONTEXT_LENGTH_EXCEEDED")
    assert len(router.workers[Role.PREFILL].submits) == before, "no worker hears of it"
    stub.channel.close()


def test_an_unknown_model(router: Front, stub: Stub) -> None:
    for name, ask in (("Chat", stub.read), ("Tokenize", stub)):
        message = chat(model="no") if name == "Chat" else pb.TokenizeRequest(model="no", text="x")
        _, details = refused(lambda ask=ask, name=name, message=message: ask(name, message),  # type: ignore[misc]
                             grpc.StatusCode.NOT_FOUND)
        assert details["ErrorInfo"].reason == "MODEL_NOT_FOUND"


@pytest.mark.parametrize("name", ["Generate", "Chat", "Tokenize"])
@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x02\xed\xa0", b"\x80\x05\x95pickle"])
def test_bytes_that_are_no_message(router: Front, stub: Stub, name: str, data: bytes) -> None:
    refused(lambda: (stub if name == "Tokenize" else stub.read)(name, data), grpc.StatusCode.INVALID_ARGUMENT)


def test_a_message_that_is_too_long(router: Front, stub: Stub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.read("Chat", chat("x" * 2_100_000))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_overload_says_when_to_come_back(router: Front, stub: Stub) -> None:
    calls = []
    for _ in range(4):
        router.answer("held", hold_at=1)
        calls.append(stub("Chat", chat()))
        next(calls[-1])
    _, details = refused(lambda: stub.read("Chat", chat()), grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert details["RetryInfo"].retry_delay.ToMilliseconds() == 1000
    assert details["ErrorInfo"].reason == "OVERLOADED"
    refused(lambda: stub("Tokenize", pb.TokenizeRequest(text="x")), grpc.StatusCode.RESOURCE_EXHAUSTED)
    for call in calls:
        call.cancel()


def test_a_worker_s_error_ends_the_stream(router: Front, stub: Stub) -> None:
    router.answer("some words and more", decode_error=worker_pb2.ERROR_CODE_INTERNAL, error_at=3)
    call, came = stub("Chat", chat()), []

    def read() -> None:
        came.extend(call)

    _, details = refused(read, grpc.StatusCode.INTERNAL)
    assert came == [] or not any(one.HasField("usage") for one in came)
    assert details["ErrorInfo"].reason == "INTERNAL"


# Deadlines, cancels, slow readers --------------------------------------------------------------------------------------


def test_the_call_s_deadline_is_the_request_s(router: Front, stub: Stub) -> None:
    router.answer("never to be seen", hold_at=1)
    call = stub("Chat", chat(), timeout=1.0)
    next(call)
    assert 0 < router.stage.last.submits[Role.PREFILL][0].remaining_ms < 1100
    started = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - started < 1.5
    router.stage.until(lambda: bool(router.stage.last.cancels[Role.DECODE]), "decode is told")


def test_without_a_deadline_the_router_s_own_holds(router: Front, stub: Stub) -> None:
    router.answer("x")
    stub.read("Chat", chat(), timeout=None)
    assert 14_000 < router.stage.last.submits[Role.PREFILL][0].remaining_ms < 15_100
    router.answer("x")
    stub.read("Chat", chat(), timeout=500)
    assert router.stage.last.submits[Role.PREFILL][0].remaining_ms < 15_100


@pytest.mark.parametrize("held", [0, 1, 5])
def test_a_cancel_reaches_the_workers(router: Front, stub: Stub, held: int) -> None:
    router.answer("one two three four five", hold_at=held)
    call = stub("Chat", chat())
    router.held()
    call.cancel()
    seen = router.stage.last
    router.stage.until(lambda: bool(seen.cancels[Role.DECODE]), "decode is told", 1.0)
    router.until_idle(1.0)


def test_a_client_that_does_not_read_is_cut_off(router: Front, stub: Stub) -> None:
    """What it leaves unread is bounded in the router, and its request ends."""
    tokens = tuple(router.tokenizer.encode("m" * 3000)) * 100
    router.stage.next(Plan(tokens=(*tokens[:4000], 1913), batch=1))
    stalled = Stub(router, **{"http2.lookahead_bytes": 1024, "http2.bdp_probe": 0, "use_local_subchannel_pool": 1})
    call = stalled("Chat", chat(logprobs=20))
    next(call)
    router.until_idle(15.0)
    came: list[Any] = []

    def read() -> None:
        came.extend(call)

    _, details = refused(read, grpc.StatusCode.CANCELLED)
    assert details["ErrorInfo"].reason == "SLOW_CLIENT"
    assert not any(one.HasField("usage") for one in came)
    stalled.channel.close()


def test_a_disconnect_cancels(router: Front, stub: Stub) -> None:
    router.answer("one two three four five", hold_at=2)
    other = Stub(router, use_local_subchannel_pool=1)
    call = other("Chat", chat())
    next(call)
    other.channel.close()
    router.until_idle(2.0)


# Health, reflection, metrics -------------------------------------------------------------------------------------------


def test_reflection_describes_the_service(router: Front, stub: Stub) -> None:
    ask = reflection_pb2.ServerReflectionRequest
    reflect = reflection_pb2_grpc.ServerReflectionStub(stub.channel)
    replies = list(reflect.ServerReflectionInfo(iter([ask(list_services=""), ask(file_containing_symbol=SERVICE)]), timeout=5))
    assert {one.name for one in replies[0].list_services_response.service} == {
        SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    files = [descriptor_pb2.FileDescriptorProto.FromString(one)
             for one in replies[1].file_descriptor_response.file_descriptor_proto]
    methods = {method.name: method.server_streaming for file in files for service in file.service for method in service.method}
    assert methods == {"Generate": True, "Chat": True, "Tokenize": False, "ListModels": False, "GetLoad": False}


def test_health_follows_the_workers(router: Front, stub: Stub) -> None:
    health = health_pb2_grpc.HealthStub(stub.channel)
    for name in ("", SERVICE):
        assert health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status == SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="x"), timeout=5)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_calls_are_counted(router: Front, stub: Stub) -> None:
    def count(name: str, code: int) -> float:
        with router.client() as client:
            lines = client.get("/metrics").text.splitlines()
        key = f'slipstream_router_requests_total{{code="{code}",route="/{SERVICE}/{name}"}} '
        return next((float(line.removeprefix(key)) for line in lines if line.startswith(key)), 0.0)

    before = count("Chat", 200), count("Chat", 400), count("Generate", 404)
    router.answer("x")
    stub.read("Chat", chat())
    refused(lambda: stub.read("Chat", chat(n=17)), grpc.StatusCode.INVALID_ARGUMENT)
    refused(lambda: stub.read("Generate", pb.GenerateRequest(model="no", text="x")), grpc.StatusCode.NOT_FOUND)
    assert (count("Chat", 200), count("Chat", 400), count("Generate", 404)) == tuple(one + 1 for one in before)


def test_not_ready_and_draining(tmp_path_factory: pytest.TempPathFactory) -> None:
    with front(tmp_path_factory.mktemp("drained")) as router:
        stub = Stub(router)
        health = health_pb2_grpc.HealthStub(stub.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=20)
        assert next(watch).status == SERVING
        router.stage.stop(router.workers[Role.DECODE])
        assert next(watch).status == NOT_SERVING
        _, details = refused(lambda: stub.read("Chat", chat()), grpc.StatusCode.UNAVAILABLE)
        assert "RetryInfo" in details
        assert "decode" in stub("GetLoad", pb.GetLoadRequest()).problem
        router.stage.worker(Role.DECODE, router.workers[Role.DECODE].address)
        assert next(watch).status == SERVING
        router.answer("goes on to its end", hold_at=2)
        call = stub("Chat", chat())
        next(call)
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(router._started[-1].stop, 15.0)
            router.stage.until(lambda: "draining" in stub("GetLoad", pb.GetLoadRequest()).problem, "it drains")
            assert health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == NOT_SERVING, "from the first moment"
            assert next(watch).status == NOT_SERVING
            _, details = refused(lambda: stub.read("Chat", chat()), grpc.StatusCode.UNAVAILABLE)
            assert "RetryInfo" in details
            router.stage.release(router.stage.last)
            assert any(one.HasField("usage") for one in call), "what runs is finished"
            assert ended.result() == 0
        stub.channel.close()


def test_a_port_that_is_taken_is_named(router: Front) -> None:
    with pytest.raises(LaunchError) as caught:
        router.start([], f"router.grpc.port={router.grpc.rpartition(':')[2]}")
    assert "router.grpc.port" in str(caught.value)


def test_every_call_but_one_asks_for_the_token(router: Front, tmp_path: Path) -> None:
    first = router.url, router.grpc
    router.start([], f"router.grpc.token_file={token_file(tmp_path)}")
    with grpc.insecure_channel(router.grpc) as channel:
        router.url, router.grpc = first
        health, reflect = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"
        paths = [*(f"{SERVICE}/{name}" for name in (*REPLIES, "None")), f"{health}/Watch", f"{health}/check",
                 f"{reflect}/ServerReflectionInfo", f"/{health}/Check", f"{health}/Check/"]
        for path in paths:
            for metadata in ((), (("authorization", "Bearer "),), (("authorization", f"Bearer {TOKEN}x"),)):
                ask: Any = channel.stream_stream(f"/{path}")
                with pytest.raises(grpc.RpcError) as caught:
                    list(ask(iter([b""]), metadata=metadata, timeout=5))
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, path
                assert TOKEN not in str(caught.value)
        assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5).status == NOT_SERVING
        models: Any = channel.unary_unary(f"/{SERVICE}/ListModels", None, pb.ListModelsResponse.FromString)
        assert models(b"", metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=5).models
