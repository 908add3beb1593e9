"""The sync client. Thread-safe: one for a process is enough."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message as Protobuf

from slipstream_client import channel, convert, errors, types
from slipstream_client.channel import SERVICE, Tls
from slipstream_client.convert import Collector
from slipstream_client.routers import Retry, Routers
from slipstream_client.types import Answer, ChatRequest, Delta, GenerateRequest
from slipstream_client.v1 import inference_pb2 as pb

T = TypeVar("T")
M = TypeVar("M", bound=Protobuf)


class Client:
    """Asks one of several routers, and another one if that fails before it has answered.

    Every method takes `timeout`, the seconds that it may take with all its tries (None: the client's), and raises ClientError.
    """

    def __init__(self, routers: str | Sequence[str], *, token: str = "", tls: Tls | None = None, timeout: float | None = None,
                 retry: Retry | None = None) -> None:
        """`routers`: `host:port`, or several. Without `tls` connections are plaintext, the token too. Raises ValueError
        without an address, OSError for a file of `tls` that cannot be read."""
        self._routers = Routers(channel.addresses(routers), retry or Retry())
        self._token = token
        self._timeout = timeout
        self._lock = threading.Lock()
        options = [*channel.OPTIONS, *(tls.options() if tls else ())]
        credentials = tls.credentials() if tls else None
        self._channels = [grpc.secure_channel(one, credentials, options) if credentials else grpc.insecure_channel(one, options)
                          for one in self._routers.addresses]

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every connection; calls that go on are cancelled."""
        for one in self._channels:
            one.close()

    # Calls ------------------------------------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest, *, timeout: float | None = None, request_id: str = "") -> Answer:
        """The whole continuation of a prompt. `request_id`: what the routers' logs are to call it."""
        with self.stream_generate(request, timeout=timeout, request_id=request_id) as stream:
            return stream.answer()

    def chat(self, request: ChatRequest, *, timeout: float | None = None, request_id: str = "") -> Answer:
        """The whole answer to a conversation."""
        with self.stream_chat(request, timeout=timeout, request_id=request_id) as stream:
            return stream.answer()

    def stream_generate(self, request: GenerateRequest, *, timeout: float | None = None, request_id: str = "") -> Stream:
        """The continuation piece by piece; it is asked for when the first piece is."""
        return Stream(self, "Generate", convert.generate_request(request), pb.GenerateResponse, timeout, request_id)

    def stream_chat(self, request: ChatRequest, *, timeout: float | None = None, request_id: str = "") -> Stream:
        """The answer piece by piece."""
        return Stream(self, "Chat", convert.chat_request(request), pb.ChatResponse, timeout, request_id)

    def tokenize(self, given: str | Sequence[types.Message], *, model: str = "",
                 timeout: float | None = None) -> tuple[int, ...]:
        """Token ids of a text, or of a conversation by the model's template."""
        reply = self._ask("Tokenize", convert.tokenize_request(given, model), pb.TokenizeResponse, timeout)
        return tuple(reply.tokens)

    def models(self, *, timeout: float | None = None) -> tuple[types.Model, ...]:
        """What a router serves."""
        reply = self._ask("ListModels", pb.ListModelsRequest(), pb.ListModelsResponse, timeout)
        return tuple(convert.model(one) for one in reply.models)

    def load(self, *, timeout: float | None = None) -> types.Load:
        """How much one of the routers has to do."""
        return convert.load(self._ask("GetLoad", pb.GetLoadRequest(), pb.GetLoadResponse, timeout))

    def _ask(self, name: str, message: Protobuf, kind: type[M], timeout: float | None) -> M:
        def ask(index: int, left: float | None) -> M:
            call: Any = self._channels[index].unary_unary(SERVICE + name, _serialize, kind.FromString)
            result: M = call(message, timeout=left, metadata=channel.metadata(self._token, ""))
            return result

        return self.first(ask, self.deadline(timeout), time.sleep)

    # What Stream needs ------------------------------------------------------------------------------------------------

    def deadline(self, timeout: float | None) -> float | None:
        """time.monotonic()."""
        seconds = self._timeout if timeout is None else timeout
        return None if seconds is None else time.monotonic() + seconds

    def open(self, index: int, name: str, message: Protobuf, kind: Any, left: float | None, request_id: str) -> Any:
        """A streamed call to one router."""
        call: Any = self._channels[index].unary_stream(SERVICE + name, _serialize, kind.FromString)
        return call(message, timeout=left, metadata=channel.metadata(self._token, request_id))

    def failure(self, index: int, error: Any) -> errors.ClientError:
        """Of an error of gRPC."""
        return errors.from_call(error.code(), error.details() or "", error.trailing_metadata() or (),
                                self._routers.addresses[index])

    def first(self, ask: Callable[[int, float | None], T], deadline: float | None, pause: Callable[[float], Any]) -> T:
        """What `ask` returns for the first router (index, seconds left) that answers."""
        attempt, failure = 0, None
        while True:
            attempt += 1
            with self._lock:
                index, wait = self._routers.choose(attempt, time.monotonic())
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and wait >= left:
                raise failure or errors.DeadlineError("the time is over before a router may be asked")
            pause(wait)
            try:
                result = ask(index, None if deadline is None else max(0.0, deadline - time.monotonic()))
            except grpc.RpcError as error:
                failure = self.failure(index, error)
                with self._lock:
                    again = self._routers.failed(index, failure, attempt, time.monotonic(), random.random())
                if not again:
                    raise failure from error
                continue
            with self._lock:
                self._routers.well(index)
            return result


class Stream(Iterator[Delta]):
    """One answer that is read as it comes. Leave it (`with`, `close`, or drop it) and the router stops computing.

    Iterating raises ClientError when the call fails, and IncompleteError for an answer that just stops.
    """

    def __init__(self, client: Client, name: str, message: Protobuf, kind: Any, timeout: float | None,
                 request_id: str) -> None:
        self._client = client
        self._ask = (name, message, kind)
        self._deadline = client.deadline(timeout)
        self._wished = request_id
        self._call: Any = None
        self._index = 0
        self._closed = threading.Event()
        self._over = False
        self._collector = Collector()

    @property
    def request_id(self) -> str:
        """As the router's log has it; empty before the first piece."""
        return self._collector.request_id

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Give the answer up, if it is not complete. Any thread may do so."""
        self._closed.set()
        if self._call is not None:
            self._call.cancel()

    def __next__(self) -> Delta:
        while not self._closed.is_set():
            if (delta := self._collector.take()) is not None:
                return delta
            if self._over:
                break
            self._next_message()
        raise StopIteration

    def text(self, choice: int = 0) -> str:
        """What was read of a choice."""
        return self._collector.text(choice)

    def answer(self) -> Answer:
        """Read to the end; all that has come, also what was read before."""
        for _ in self:
            pass
        return self._collector.answer()

    def _next_message(self) -> None:
        try:
            if self._call is None:
                message = self._client.first(self._open, self._deadline, self._closed.wait)
            else:
                message = next(self._call, None)
        except grpc.RpcError as error:
            self._over = True
            raise self._client.failure(self._index, error) from error
        except errors.ClientError:
            self._over = True
            raise
        if message is None:
            self._over = True
            self._collector.answer()  # raises for one that is not complete
        else:
            self._collector.add(message)

    def _open(self, index: int, left: float | None) -> Any:
        if self._closed.is_set():
            raise errors.CancelledError("the stream was closed")
        self._index, (name, message, kind) = index, self._ask
        self._call = self._client.open(index, name, message, kind, left, self._wished)
        if self._closed.is_set():  # meanwhile
            self._call.cancel()
        first = next(self._call, None)
        with suppress(KeyError):
            self._collector.request_id = dict(self._call.initial_metadata())["x-request-id"]
        return first


def _serialize(message: Protobuf) -> bytes:
    return message.SerializeToString()
