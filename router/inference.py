"""The public gRPC service: Inference, health and reflection, on top of the same RouterService and Reader as HTTP.

Requests come as bytes and are parsed here, so that bytes that are no message are the caller's mistake and not a fault of ours.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from router import inference_convert as convert
from router import openai
from router.admission import Client
from router.events import LINGER_SECONDS
from router.reader import Reader
from router.service import RouterService, Ticket, request_names
from slipstream.errors import InternalError, InvalidRequestError, SlipstreamError, SlowClientError
from slipstream.observability import logs
from slipstream.rpc.security import CLIENT_REFUSAL, Security
from slipstream.rpc.server import join_address, listen, new_server
from slipstream_client.v1 import inference_pb2 as pb

logger = logging.getLogger(__name__)

SERVICE = "slipstream.inference.v1.Inference"
LOOK_SECONDS = 1.0
"""How late the health service's watchers may hear that a request would be refused now."""
STOP_SECONDS = 1.0
KEY_REFUSAL = "the API key is missing or not known here: send it as the token (router.keys_file)"
LARGE_BYTES = 1 << 20
"""A longer message is parsed on a thread."""

M = TypeVar("M", bound=Message)
Context = grpc.aio.ServicerContext[bytes, Message]
Response = type[pb.GenerateResponse] | type[pb.ChatResponse]


class InferenceServer:
    """One per router. `start`, then `drain` and `stop`."""

    def __init__(self, service: RouterService, security: Security) -> None:
        self._service = service
        self._security = security
        self._server = new_server(security, refusal=KEY_REFUSAL if service.keys.wanted else CLIENT_REFUSAL,
                                  accepts=service.keys.accepts if service.keys.wanted else None,
                                  max_receive_bytes=service.config.router.max_body_bytes)
        self._health = health.aio.HealthServicer()
        self._watch: asyncio.Task[None] | None = None
        streams: dict[str, Callable[[bytes, Context], Awaitable[None]]] = {"Generate": self._generate, "Chat": self._chat}
        calls: dict[str, Callable[[bytes, Context], Awaitable[Message]]] = {
            "Tokenize": self._tokenize, "ListModels": self._list_models, "GetLoad": self._get_load}
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_stream_rpc_method_handler(partial(self._guarded, name, work),
                                                       response_serializer=_serialize) for name, work in streams.items()}
        handlers |= {name: grpc.unary_unary_rpc_method_handler(partial(self._guarded, name, work),
                                                               response_serializer=_serialize) for name, work in calls.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self, host: str, port: int) -> str:
        """Listen; the address with the port that was bound. Raises ConfigError."""
        address = await listen(self._server, join_address(host, port), self._security)
        self._watch = asyncio.create_task(self._keep_health())
        return address

    async def drain(self) -> None:
        """Tell whoever asks for health that nothing new is taken."""
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        """End the server."""
        if self._watch is not None:
            self._watch.cancel()
        await self._server.stop(STOP_SECONDS)

    async def _keep_health(self) -> None:
        while True:
            said = health_pb2.HealthCheckResponse
            now = said.NOT_SERVING if self._service.problem() else said.SERVING
            for name in ("", SERVICE):
                await self._health.set(name, now)
            await self._service.workers.change(LOOK_SECONDS)

    # Calls ------------------------------------------------------------------------------------------------------------

    async def _guarded(self, name: str, work: Callable[[bytes, Context], Awaitable[Any]], data: bytes, context: Context) -> Any:
        """Request id, status, details and counters around every call."""
        given = dict(context.invocation_metadata() or ()).get("x-request-id", "")
        ours, shown = request_names(given if isinstance(given, str) else "")
        logs.request_id.set(ours)
        code, failure = 499, None
        try:
            await context.send_initial_metadata((("x-request-id", shown),))
            result = await work(data, context)
            code = 200
            return result
        except SlipstreamError as error:
            failure, code = error, error.http_status
        except Exception:
            logger.exception("a fault in %s", name)
            failure, code = InternalError(f"a fault of the router; its log has more under request id {ours}"), 500
        finally:
            self._service.metrics.requests.labels(f"/{SERVICE}/{name}", str(code)).inc()
        status = grpc.StatusCode[failure.grpc_status]
        details = convert.status(failure, status.value[0], shown)
        await context.abort(status, details.message, (("grpc-status-details-bin", details.SerializeToString()),))

    async def _generate(self, data: bytes, context: Context) -> None:
        request = await _parsed(pb.GenerateRequest, data)
        parsed = convert.generate_request(request, self._service.model_name)
        ticket = await self._service.begin_completion(parsed, logs.request_id.get(), self._deadline(context),
                                                     self._client(context))
        await self._answer(ticket, pb.GenerateResponse, context)

    async def _chat(self, data: bytes, context: Context) -> None:
        request = await _parsed(pb.ChatRequest, data)
        parsed = await _converted(data, convert.chat_request, request, self._service.model_name)
        ticket = await self._service.begin_chat(parsed, logs.request_id.get(), self._deadline(context), self._client(context))
        await self._answer(ticket, pb.ChatResponse, context)

    def _client(self, context: Context) -> Client:
        shown = dict(context.invocation_metadata() or ()).get("authorization")
        return self._service.keys.client(shown if isinstance(shown, str) else None)

    async def _answer(self, ticket: Ticket, kind: Response, context: Context) -> None:
        """Everything that the request puts out, to a client that may leave (which cancels this) or stop reading."""
        reader = Reader(self._service, ticket)
        writing = asyncio.create_task(self._write(reader, kind, context))
        late = asyncio.create_task(_late(ticket))
        try:
            await asyncio.wait((writing, late), return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                raise SlowClientError("the request ended, and what it put out was not read; read faster")
            await writing
        finally:
            for task in (writing, late):
                task.cancel()
            await asyncio.gather(writing, late, return_exceptions=True)
            reader.close()

    async def _write(self, reader: Reader, kind: Response, context: Context) -> None:
        tokenizer, chat, told = self._service.builder.tokenizer, kind is pb.ChatResponse, None
        generation = reader.ticket.generation
        while not reader.over:
            deltas = [delta for piece in await reader.next() for delta in convert.deltas(piece, tokenizer, chat=chat)]
            if told is None and (told := generation.prompt_logprobs) is not None:
                for part in convert.prompt_logprobs(generation.request.prompt.tokens, told, tokenizer):
                    await context.write(kind(prompt_logprobs=part))
            if reader.over:
                await context.write(kind(deltas=deltas, usage=convert.usage(reader.usage())))
            elif deltas:
                await context.write(kind(deltas=deltas))

    async def _tokenize(self, data: bytes, context: Context) -> Message:
        request, service = await _parsed(pb.TokenizeRequest, data), self._service
        model, deadline, client = request.model or service.model_name, self._deadline(context), self._client(context)
        if request.WhichOneof("input") == "conversation":
            asked = pb.ChatRequest(model=model, messages=request.conversation.messages)
            chat = await _converted(data, convert.chat_request, asked, model)
            tokens = await service.tokens(model, lambda take: service.builder.chat(chat.messages, take), deadline, client)
        else:
            tokens = await service.tokens(model, lambda take: service.builder.text(request.text), deadline, client)
        return pb.TokenizeResponse(tokens=tokens, max_context=service.max_context)

    async def _list_models(self, data: bytes, context: Context) -> Message:
        service = self._service
        return pb.ListModelsResponse(models=[pb.Model(
            id=service.model_name, max_context=service.max_context, created=service.created,
            takes_images=service.checkpoint.image is not None, takes_videos=service.checkpoint.video is not None)])

    async def _get_load(self, data: bytes, context: Context) -> Message:
        return convert.load(self._service.status())

    def _deadline(self, context: Context) -> float:
        """The call's, as far as the router allows."""
        limit = self._service.config.router.request_timeout_seconds
        left = context.time_remaining()
        return time.monotonic() + (limit if left is None else min(limit, left))


async def _late(ticket: Ticket) -> None:
    await ticket.generation.wait()
    await asyncio.sleep(LINGER_SECONDS)


async def _parsed(kind: type[M], data: bytes) -> M:
    """Raises InvalidRequestError for bytes that are no message."""
    try:
        return await asyncio.to_thread(kind.FromString, data) if len(data) > LARGE_BYTES else kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequestError(f"these bytes are no {kind.DESCRIPTOR.full_name}: {error}") from error


async def _converted(data: bytes, work: Callable[[pb.ChatRequest, str], openai.ChatRequest], request: pb.ChatRequest,
                     model: str) -> openai.ChatRequest:
    """On a thread where there are pictures to encode."""
    return await asyncio.to_thread(work, request, model) if len(data) > LARGE_BYTES else work(request, model)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
