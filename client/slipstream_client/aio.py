"""The asyncio client: as the sync one, for one event loop."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message as Protobuf

from slipstream_client import channel, convert, errors, types
from slipstream_client.channel import SERVICE, Tls
from slipstream_client.convert import Collector
from slipstream_client.routers import Retry, Routers
from slipstream_client.types import Answer, ChatRequest, Delta, GenerateRequest
from slipstream_client.v1 import inference_pb2 as pb

T = TypeVar("T")
M = TypeVar("M", bound=Protobuf)


class AsyncClient:
    """Asks one of several routers, and another one if that fails before it has answered.

    Every method takes `timeout`, the seconds that it may take with all its tries (None: the client's), and raises ClientError.
    """

    def __init__(self, routers: str | Sequence[str], *, token: str = "", tls: Tls | None = None, timeout: float | None = None,
                 retry: Retry | None = None) -> None:
        """As Client has it. Connects in the event loop of the first call."""
        self._routers = Routers(channel.addresses(routers), retry or Retry())
        self._token = token
        self._timeout = timeout
        self._options = [*channel.OPTIONS, *(tls.options() if tls else ())]
        self._credentials = tls.credentials() if tls else None
        self._channels: dict[int, grpc.aio.Channel] = {}

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every connection; calls that go on are cancelled."""
        channels, self._channels = self._channels, {}
        for one in channels.values():
            await one.close()

    # Calls ------------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest, *, timeout: float | None = None, request_id: str = "") -> Answer:
        """The whole continuation of a prompt. `request_id`: what the routers' logs are to call it."""
        async with self.stream_generate(request, timeout=timeout, request_id=request_id) as stream:
            return await stream.answer()

    async def chat(self, request: ChatRequest, *, timeout: float | None = None, request_id: str = "") -> Answer:
        """The whole answer to a conversation."""
        async with self.stream_chat(request, timeout=timeout, request_id=request_id) as stream:
            return await stream.answer()

    def stream_generate(self, request: GenerateRequest, *, timeout: float | None = None, request_id: str = "") -> AsyncStream:
        """The continuation piece by piece; it is asked for when the first piece is."""
        return AsyncStream(self, "Generate", convert.generate_request(request), pb.GenerateResponse, timeout, request_id)

    def stream_chat(self, request: ChatRequest, *, timeout: float | None = None, request_id: str = "") -> AsyncStream:
        """The answer piece by piece."""
        return AsyncStream(self, "Chat", convert.chat_request(request), pb.ChatResponse, timeout, request_id)

    async def tokenize(self, given: str | Sequence[types.Message], *, model: str = "",
                       timeout: float | None = None) -> tuple[int, ...]:
        """Token ids of a text, or of a conversation by the model's template."""
        reply = await self._ask("Tokenize", convert.tokenize_request(given, model), pb.TokenizeResponse, timeout)
        return tuple(reply.tokens)

    async def models(self, *, timeout: float | None = None) -> tuple[types.Model, ...]:
        """What a router serves."""
        reply = await self._ask("ListModels", pb.ListModelsRequest(), pb.ListModelsResponse, timeout)
        return tuple(convert.model(one) for one in reply.models)

    async def load(self, *, timeout: float | None = None) -> types.Load:
        """How much one of the routers has to do."""
        return convert.load(await self._ask("GetLoad", pb.GetLoadRequest(), pb.GetLoadResponse, timeout))

    async def _ask(self, name: str, message: Protobuf, kind: type[M], timeout: float | None) -> M:
        async def ask(index: int, left: float | None) -> M:
            call: Any = self._channel(index).unary_unary(SERVICE + name, _serialize, kind.FromString)
            with _failures(self._routers.addresses[index]):
                result: M = await call(message, timeout=left, metadata=channel.metadata(self._token, ""))
            return result

        return await self.first(ask, self.deadline(timeout))

    def _channel(self, index: int) -> grpc.aio.Channel:
        if index not in self._channels:
            address = self._routers.addresses[index]
            self._channels[index] = (grpc.aio.secure_channel(address, self._credentials, self._options) if self._credentials
                                     else grpc.aio.insecure_channel(address, self._options))
        return self._channels[index]

    # What AsyncStream needs -------------------------------------------------------------------------------------------

    def deadline(self, timeout: float | None) -> float | None:
        """time.monotonic()."""
        seconds = self._timeout if timeout is None else timeout
        return None if seconds is None else time.monotonic() + seconds

    def open(self, index: int, name: str, message: Protobuf, kind: Any, left: float | None, request_id: str) -> Any:
        """A streamed call to one router."""
        call: Any = self._channel(index).unary_stream(SERVICE + name, _serialize, kind.FromString)
        return call(message, timeout=left, metadata=channel.metadata(self._token, request_id))

    async def read(self, index: int, call: Any) -> Any:
        """The next message of a streamed call; None at its end."""
        with _failures(self._routers.addresses[index]):
            message = await call.read()
        return None if message is grpc.aio.EOF else message

    async def first(self, ask: Callable[[int, float | None], Awaitable[T]], deadline: float | None) -> T:
        """What `ask` returns for the first router (index, seconds left) that answers."""
        attempt, failure = 0, None
        while True:
            attempt += 1
            index, wait = self._routers.choose(attempt, time.monotonic())
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and wait >= left:
                raise failure or errors.DeadlineError("the time is over before a router may be asked")
            await asyncio.sleep(wait)
            try:
                result = await ask(index, None if deadline is None else max(0.0, deadline - time.monotonic()))
            except errors.ClientError as error:
                failure = error
                if not self._routers.failed(index, failure, attempt, time.monotonic(), random.random()):
                    raise
                continue
            self._routers.well(index)
            return result


class AsyncStream(AsyncIterator[Delta]):
    """One answer that is read as it comes. Leave it (`async with`, `close`, or drop it) and the router stops computing.

    Iterating raises ClientError when the call fails, and IncompleteError for an answer that just stops.
    """

    def __init__(self, client: AsyncClient, name: str, message: Protobuf, kind: Any, timeout: float | None,
                 request_id: str) -> None:
        self._client = client
        self._ask = (name, message, kind)
        self._deadline = client.deadline(timeout)
        self._wished = request_id
        self._call: Any = None
        self._index = 0
        self._over = False
        self._closed = False
        self._collector = Collector()

    @property
    def request_id(self) -> str:
        """As the router's log has it; empty before the first piece."""
        return self._collector.request_id

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._call is not None and not self._call.done():
            self._call.cancel()

    def close(self) -> None:
        """Give the answer up, if it is not complete."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    async def __anext__(self) -> Delta:
        while not self._closed:
            if (delta := self._collector.take()) is not None:
                return delta
            if self._over:
                break
            await self._next_message()
        raise StopAsyncIteration

    def text(self, choice: int = 0) -> str:
        """What was read of a choice."""
        return self._collector.text(choice)

    async def answer(self) -> Answer:
        """Read to the end; all that has come, also what was read before."""
        async for _ in self:
            pass
        return self._collector.answer()

    async def _next_message(self) -> None:
        try:
            message = await (self._client.first(self._open, self._deadline) if self._call is None
                             else self._client.read(self._index, self._call))
        except BaseException:
            self._over = True
            raise
        if message is None:
            self._over = True
            self._collector.answer()  # raises for one that is not complete
        else:
            self._collector.add(message)

    async def _open(self, index: int, left: float | None) -> Any:
        if self._closed:
            raise errors.CancelledError("the stream was closed")
        self._index, (name, message, kind) = index, self._ask
        self._call = self._client.open(index, name, message, kind, left, self._wished)
        first = await self._client.read(index, self._call)
        self._collector.request_id = dict(await self._call.initial_metadata()).get("x-request-id", "")
        return first


class _failures:
    """Turns gRPC's errors into ours. A cancel of the task stays one; that of a call, by either side, is an error as others."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, grpc.aio.AioRpcError):
            raise errors.from_call(error.code(), error.details() or "", error.trailing_metadata(), self._address) from error
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and not (task is not None and task.cancelling()):
            raise errors.CancelledError(f"{self._address}: the call was cancelled, here or by the router") from error


def _serialize(message: Protobuf) -> bytes:
    return message.SerializeToString()
