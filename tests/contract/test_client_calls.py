"""The client SDK, sync and asyncio alike, against real routers in front of scripted workers."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.types import Role
from slipstream.v1 import worker_pb2
from slipstream_client import (
    AsyncClient,
    AuthenticationError,
    CancelledError,
    ChatRequest,
    Client,
    ClientError,
    DeadlineError,
    GenerateRequest,
    Image,
    IncompleteError,
    InvalidRequestError,
    Message,
    NotFoundError,
    OverloadedError,
    Retry,
    Sampling,
    ServerError,
    Stop,
    Tls,
    TooLargeError,
    UnavailableError,
    Video,
    assistant,
    system,
    user,
)
from tests.support.certificates import NAME, TOKEN, Authority, overrides, token_file
from tests.support.cluster import free_port
from tests.support.scripted_router import MODEL, REFUSING, Front, front

ASK = ChatRequest([user("hello")])
ONCE = Retry(attempts=1)


class Waiting:
    """The asyncio client behind the methods of the sync one, so that every test runs on both."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = AsyncClient(*arguments, **named)

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self._client.close())
        self._loop.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        if name.startswith("stream"):
            return lambda *arguments, **named: WaitingStream(self._wait, method(*arguments, **named))
        return lambda *arguments, **named: self._wait(method(*arguments, **named))

    def _wait(self, work: Awaitable[Any]) -> Any:
        async def run() -> Any:
            return await work

        return self._loop.run_until_complete(run())


class WaitingStream:
    def __init__(self, wait: Callable[[Awaitable[Any]], Any], stream: Any) -> None:
        self._wait, self._stream = wait, stream

    def __enter__(self) -> WaitingStream:
        self._wait(self._stream.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self._stream.__aexit__(None, None, None))

    def __iter__(self) -> WaitingStream:
        return self

    def __next__(self) -> Any:
        try:
            return self._wait(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def answer(self) -> Any:
        return self._wait(self._stream.answer())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@pytest.fixture(params=[Client, Waiting], ids=["sync", "asyncio"])
def make(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("router"), *REFUSING, "router.max_in_flight=2", "router.max_waiting=0") as one:
        yield one


@pytest.fixture
def client(router: Front, make: Any) -> Iterator[Any]:
    """After each test nothing is in flight."""
    router.stage.forget()
    with make(router.grpc, timeout=20) as made:
        yield made
        router.until_idle()
    router.stage.plans.clear()


# Answers ---------------------------------------------------------------------------------------------------------------


def test_a_whole_answer(router: Front, client: Any) -> None:
    tokens = router.answer("A 🙂 three.", others=((100, 1913),))
    answer = client.chat(ChatRequest([system("s"), user("a", "b"), assistant("c"), user("d")], n=2, logprobs=2,
                                     model=MODEL, sampling=Sampling(temperature=0.5, seed=1, logit_bias={5: 1.0}),
                                     stop=Stop(max_tokens=64, strings=["zz"])), request_id="mine")
    assert answer.text == "A 🙂 three."
    assert [one.finish_reason for one in answer.choices] == ["stop", "stop"]
    assert answer.request_id == "mine"
    assert answer.usage.completion_tokens == len(tokens) + 2
    assert b"".join(one.text for one in answer.choices[0].logprobs).decode() == "A 🙂 three."
    assert {len(one.top) for one in answer.choices[0].logprobs} == {2}
    submit = router.stage.last.submits[Role.PREFILL][0]
    assert (submit.max_tokens, submit.sampling.seed, list(submit.sampling.biased_token)) == (64, 1, [5])


def test_a_stream_and_a_prompt_of_ids(router: Front, client: Any) -> None:
    router.answer("one two three", stop=False)
    stream = client.stream_generate(GenerateRequest([100, 101], stop=Stop(max_tokens=3)))
    first = next(stream)
    assert first.text == stream.text()
    assert stream.request_id
    answer = stream.answer()
    assert answer.text == router.tokenizer.decode(list(router.stage.last.output()))
    assert answer.choices[0].finish_reason == "length"
    assert answer.request_id == stream.request_id
    assert list(stream) == []
    router.answer("more")
    assert client.generate(GenerateRequest("text")).text == "more"


def test_pictures(router: Front, client: Any) -> None:
    data = next((Path(__file__).parents[1] / "samples").glob("*.png")).read_bytes()
    router.answer("seen")
    clip = Video([Image(data), Image(data)], timestamps=[0, 2])
    assert client.chat(ChatRequest([user(Image(data), clip, "what?")])).text == "seen"
    assert len(router.stage.last.submits[Role.PREFILL][0].images) == 2


def test_models_load_and_tokens(router: Front, client: Any) -> None:
    (model,) = client.models()
    assert (model.id, model.takes_images) == (MODEL, True)
    assert client.load().problem == ""
    assert {one.role for one in client.load().replicas} == {"prefill", "decode"}
    assert client.tokenize("hello") == tuple(router.tokenizer.encode("hello"))
    assert len(client.tokenize([user("hello")])) > len(client.tokenize("hello"))


# Errors ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("request_", "kind", "field"), [
    (ChatRequest([user("x")], sampling=Sampling(temperature=9)), InvalidRequestError, "sampling.temperature"),
    (ChatRequest([user("x")], stop=Stop(max_tokens=-1)), InvalidRequestError, ""),
    (ChatRequest([user("x")], logprobs="many"), InvalidRequestError, ""),  # type: ignore[arg-type]
    (ChatRequest([Message("wizard", ("x",))]), InvalidRequestError, "messages[0].role"),  # type: ignore[arg-type]
    (ChatRequest([user(5)]), InvalidRequestError, ""),  # type: ignore[arg-type]
    (ChatRequest([user("\ud800")]), InvalidRequestError, ""),
    (ChatRequest([]), InvalidRequestError, "messages"),
    (ChatRequest([user("x")], model="no"), NotFoundError, "model"),
    (ChatRequest([user("x" * 3_000_000)]), TooLargeError, None),
])
def test_what_is_wrong_is_said_at_once(client: Any, request_: ChatRequest, kind: type[ClientError], field: str | None) -> None:
    with pytest.raises(kind) as caught:
        client.chat(request_)
    assert type(caught.value) is kind
    assert [one.field for one in caught.value.violations] == ([] if field is None else [field])


def test_a_failure_after_the_first_piece_is_raised_and_not_tried_again(router: Front, client: Any) -> None:
    router.answer("one two three four", decode_error=worker_pb2.ERROR_CODE_INTERNAL, error_at=4)
    stream, pieces = client.stream_chat(ASK), []
    with pytest.raises(ServerError) as caught:
        pieces.extend(stream)
    assert caught.value.request_id
    assert len(router.stage.seen) == 1
    with pytest.raises(IncompleteError):
        stream.answer()


def test_a_deadline(router: Front, client: Any) -> None:
    router.answer("never", hold_at=1)
    started = time.monotonic()
    with pytest.raises(DeadlineError):
        client.chat(ASK, timeout=0.5)
    assert time.monotonic() - started < 1.5
    router.until_idle(1.0)


def test_an_overload_is_waited_out(router: Front, client: Any) -> None:
    """For as long as the router says."""
    held = []
    for _ in range(2):
        router.answer("held", hold_at=1)
        held.append(client.stream_chat(ASK))
        next(held[-1])
    with pytest.raises(OverloadedError) as caught:
        client.chat(ASK, timeout=0.5)  # less than that
    assert caught.value.retry_after_seconds == 1.0
    started = time.monotonic()
    free = threading.Timer(0.3, lambda: list(map(router.stage.release, list(router.stage.seen.values()))))
    free.start()
    router.answer("at last")
    assert client.chat(ASK).text == "at last"
    assert 0.4 < time.monotonic() - started < 5
    assert [one.answer().text for one in held] == ["held", "held"]
    free.join()


# Leaving ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["with", "close", "drop"])
def test_leaving_a_stream_cancels_it(router: Front, client: Any, how: str) -> None:
    router.answer("one two three four", hold_at=3)
    stream = client.stream_chat(ASK)
    next(stream)
    seen = router.stage.last
    if how == "with":
        with stream:
            pass
    elif how == "close":
        stream.close()
        assert list(stream) == []
    else:
        del stream
        gc.collect()
        client.models()  # a turn of the event loop, where there is one
    router.stage.until(lambda: bool(seen.cancels[Role.DECODE]), "decode is told", 1.0)
    router.until_idle(1.0)


def test_another_thread_may_close_a_stream(router: Front) -> None:
    router.answer("one two three four", hold_at=0)
    with Client(router.grpc) as client:
        stream = client.stream_chat(ASK)
        timer = threading.Timer(0.3, stream.close)
        timer.start()
        with pytest.raises(CancelledError):
            next(stream)
        timer.join()
    router.until_idle(1.0)


async def test_cancelling_the_task_cancels_the_request(router: Front) -> None:
    router.answer("one two three four", hold_at=2)
    async with AsyncClient(router.grpc) as client:
        task = asyncio.create_task(client.chat(ASK))
        await asyncio.to_thread(router.held)
        seen = router.stage.last
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(router.stage.until, lambda: bool(seen.cancels[Role.DECODE]), "decode is told", 1.0)
    router.until_idle(1.0)


async def test_many_at_once_on_one_client(router: Front) -> None:
    """More than the router takes: the others wait for their turn."""
    router.stage.forget()
    for _ in range(8):
        router.answer("an answer")
    async with AsyncClient(router.grpc, timeout=30, retry=Retry(attempts=20)) as client:
        answers = await asyncio.gather(*(client.chat(ASK) for _ in range(8)))
    assert [one.text for one in answers] == ["an answer"] * 8


# Several routers -------------------------------------------------------------------------------------------------------


def test_one_router_dies(router: Front, make: Any) -> None:
    """Between requests nobody notices; a stream that has begun says so, and is not begun again."""
    router.stage.forget()
    workers, first = [one.address for one in router.workers.values()], (router.url, router.grpc)
    other = router.start(workers)
    router.until_healthy()
    try:
        with make([router.grpc, first[1]], timeout=20) as client:
            router.answer("one two three four", hold_at=2)
            stream = client.stream_chat(ASK)  # at the new router
            next(stream)
            other.kill()
            other.wait()
            with pytest.raises(UnavailableError):
                list(stream)
            assert len(router.stage.seen) == 1
            for _ in range(4):
                router.answer("still here")
                assert client.chat(ASK).text == "still here"
    finally:
        router._started.remove(other)
        other.stop(1.0)
        router.url, router.grpc = first


def test_a_router_that_comes_back_is_waited_for(router: Front, make: Any, tmp_path: Path) -> None:
    port, first = free_port(), (router.url, router.grpc)
    started: list[Any] = []
    timer = threading.Timer(0.5, lambda: started.append(router.start([one.address for one in router.workers.values()],
                                                                     f"router.grpc.port={port}")))
    try:
        with make(f"127.0.0.1:{port}", timeout=20, retry=Retry(attempts=30, most_seconds=0.5)) as client:
            with pytest.raises(UnavailableError):
                client.models(timeout=0.3)
            timer.start()
            router.stage.forget()
            router.answer("there again")
            assert client.chat(ASK).text == "there again"
    finally:
        timer.join()
        router.url, router.grpc = first


def test_nobody_there(make: Any) -> None:
    with make([f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"], retry=Retry(attempts=4, first_seconds=0.01)) as client:
        started = time.monotonic()
        with pytest.raises(UnavailableError):
            client.chat(ASK)
        assert time.monotonic() - started < 3
    with pytest.raises(ValueError, match="one router at least"):
        make(" , ").__enter__()


# Who may ask -----------------------------------------------------------------------------------------------------------


def test_a_token_of_clients_own_over_tls(router: Front, make: Any, tmp_path: Path) -> None:
    authority, first = Authority(tmp_path), (router.url, router.grpc)
    made = authority.settings()
    keys = {"token_file": str(token_file(tmp_path)), "tls_cert": made["tls_cert"], "tls_key": made["tls_key"]}
    router.start([one.address for one in router.workers.values()],
                 *[one.replace("security.", "router.grpc.") for one in overrides(**keys)])
    address, (router.url, router.grpc) = router.grpc, first
    tls = Tls(ca=made["tls_ca"], server_name=NAME)
    with make(address, token=TOKEN, tls=tls, timeout=10) as client:
        assert client.models()[0].id == MODEL
    for token in ("", "x" * 20):
        with make(address, token=token, tls=tls, timeout=10) as client:
            for ask in (client.models, lambda client=client: client.chat(ASK), lambda client=client: client.tokenize("x")):
                with pytest.raises(AuthenticationError, match="token"):
                    ask()
    for other in (None, Tls(ca=Authority(tmp_path, "other").ca, server_name=NAME), Tls(ca=made["tls_ca"])):
        with make(address, token=TOKEN, tls=other, timeout=10, retry=ONCE) as client, pytest.raises(UnavailableError):
            client.models()


def test_the_deployment_s_security_holds_where_there_is_no_other(router: Front, make: Any, tmp_path: Path) -> None:
    """Mutual TLS: a client without a certificate is no client."""
    made, first = Authority(tmp_path).settings(), (router.url, router.grpc)
    router.start([], *overrides(token_file=str(token_file(tmp_path)), **made))
    address, (router.url, router.grpc) = router.grpc, first
    tls = Tls(ca=Path(made["tls_ca"]), cert=Path(made["tls_cert"]).read_bytes(), key=made["tls_key"], server_name=NAME)
    with make(address, token=TOKEN, tls=tls, timeout=10) as client:
        assert client.models()[0].id == MODEL
    with make(address, tls=tls, timeout=10) as client, pytest.raises(AuthenticationError):
        client.models()
    without = Tls(ca=made["tls_ca"], server_name=NAME)
    with make(address, token=TOKEN, tls=without, timeout=10, retry=ONCE) as client, pytest.raises(UnavailableError):
        client.models()
