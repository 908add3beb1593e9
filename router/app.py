"""The HTTP surface: routes, bodies, statuses, disconnects. Knows no worker.

An error before the first byte has its own status and OpenAI's error object; after it the stream ends with an error event.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from router import openai, openapi, responses, tokens
from router.completions import Completion, Shape
from router.events import EventStream
from router.inspect import DETAILS
from router.reader import Piece, Reader
from router.response_events import ResponseEvents
from router.service import RouterService, Ticket, request_names
from router.stream import error_body
from slipstream.errors import (
    AuthenticationError,
    CancelledError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    NotFoundError,
    RequestTooLargeError,
    SlipstreamError,
)
from slipstream.observability import logs
from slipstream.observability.metrics import CONTENT_TYPE

logger = logging.getLogger(__name__)

_CHAT, _COMPLETIONS, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
NOTICE_SECONDS = 1.0
"""How long the server may take to say that a connection has broken, after a write on it failed."""
_json = msgspec.json.Encoder()

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]


class App:
    """Binds a RouterService to its routes."""

    def __init__(self, service: RouterService) -> None:
        self._service = service
        self._open = {"/health", "/live"} | ({"/metrics"} if service.config.router.open_metrics else set())
        self._routes = Starlette(
            routes=[Route(path, self._guard(path, endpoint), methods=[method]) for path, endpoint, method in self.routes()],
            exception_handlers={HTTPException: self._no_route})
        self._routes.router.redirect_slashes = False

    def routes(self) -> list[tuple[str, Endpoint, str]]:
        """(path, what answers, method)."""
        return [(_CHAT, self._chat, "POST"), (_COMPLETIONS, self._completion, "POST"), (_RESPONSES, self._response, "POST"),
                ("/tokenize", self._tokenize, "POST"), ("/detokenize", self._detokenize, "POST"),
                ("/openapi.json", self._openapi, "GET"),
                ("/v1/models", self._models, "GET"), ("/v1/models/{name:path}", self._model, "GET"),
                ("/health", self._health, "GET"), ("/live", self._live, "GET"), ("/metrics", self._metrics, "GET"),
                ("/status", self._status, "GET"), ("/explain/{name:path}", self._explain, "GET")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What the HTTP server calls."""
        try:
            await self._routes(scope, receive, send)
        except RuntimeError:  # uvloop's for a write on a connection that has just broken; the server says so a moment later
            try:
                async with asyncio.timeout(NOTICE_SECONDS):
                    while (await receive())["type"] != "http.disconnect":
                        pass
            except TimeoutError:
                pass
            else:
                logger.info("the client left while its answer was sent")
                return
            raise

    # Plain endpoints --------------------------------------------------------------------------------------------------

    async def _live(self, request: Request) -> Response:
        return _respond({"status": "live"})

    async def _health(self, request: Request) -> Response:
        problem = self._service.problem()
        return _respond({"status": "unavailable" if problem else "ok", "problem": problem}, 503 if problem else 200,
                        {"retry-after": "1"} if problem else {})

    async def _metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.exposition(), media_type=CONTENT_TYPE)

    async def _status(self, request: Request) -> Response:
        if (detail := request.query_params.get("detail", "")) in DETAILS:
            return _respond(await self._service.details(detail))
        return _respond(self._service.status())

    async def _explain(self, request: Request) -> Response:
        trace = self._service.routing.traces.find(request.path_params["name"])
        if trace is None:
            raise NotFoundError("this router knows no such request; it keeps the last ones only (router.routing.decisions), "
                                "and other routers have their own")
        return _respond(trace.told())

    async def _models(self, request: Request) -> Response:
        return _respond({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        if request.path_params["name"] != self._service.model_name:
            raise ModelNotFoundError(f"no such model; this router serves {self._service.model_name}", field="model")
        return _respond(self._card())

    def _card(self) -> dict[str, Any]:
        service = self._service
        return {"id": service.model_name, "object": "model", "created": service.created, "owned_by": "slipstream",
                "max_model_len": service.max_context}

    # Generation -------------------------------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        deadline = self._deadline(request)
        parsed = openai.chat_request(await self._body(request, deadline))
        begin = self._service.begin_chat(parsed, logs.request_id.get(), deadline, request.state.client)
        return await self._answer(request, await _unless_gone(request, begin), _CHAT)

    async def _completion(self, request: Request) -> Response:
        deadline = self._deadline(request)
        parsed = openai.completion_request(await self._body(request, deadline))
        begin = self._service.begin_completion(parsed, logs.request_id.get(), deadline, request.state.client)
        return await self._answer(request, await _unless_gone(request, begin), _COMPLETIONS)

    async def _response(self, request: Request) -> Response:
        deadline = self._deadline(request)
        body = await self._body(request, deadline)
        with responses.own_names():
            begin = self._service.begin_chat(responses.chat_request(body), logs.request_id.get(), deadline,
                                             request.state.client)
            ticket = await _unless_gone(request, begin)
        return await self._answer(request, ticket, _RESPONSES, body)

    async def _answer(self, request: Request, ticket: Ticket, path: str, body: Any = None) -> Response:
        view = self._view(request, ticket, path, body)
        reader = Reader(self._service, ticket)
        watch = asyncio.create_task(_disconnect(request, ticket))
        try:
            if not ticket.options.stream:
                return _respond(await self._whole(reader, view))
            first: list[Piece] = []
            while not first:  # a failure before the first token still has its own status
                first = await reader.next()
            if ticket.options.echo_logprobs is not None:
                await asyncio.to_thread(reader.echoed)
        except BaseException:
            reader.close()
            raise
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch

        def close() -> None:
            reader.close()
            end = ticket.generation.end
            self._count(path, 200 if end is None or end.error is None else end.error.http_status)

        return EventStream(self._stream(reader, first, view), ended=ticket.generation.wait, close=close)

    def _view(self, request: Request, ticket: Ticket, path: str, body: Any) -> Completion | ResponseEvents:
        name, model, now = ticket.id.rpartition("-")[2], self._service.model_name, int(time.time())
        wants_report = request.headers.get("x-slipstream-report") == "1"
        if path == _RESPONSES:
            return ResponseEvents(f"resp_{name}", model, now, body, wants_report=wants_report)
        chat = path == _CHAT
        shape = Shape(id=("chatcmpl-" if chat else "cmpl-") + name, model=model, created=now, chat=chat)
        return Completion(shape, wants_report=wants_report)

    async def _whole(self, reader: Reader, view: Completion | ResponseEvents) -> dict[str, Any]:
        pieces: list[list[Piece]] = [[] for _ in reader.ticket.texts]
        while not reader.over:
            for piece in await reader.next():
                pieces[piece.choice].append(piece)
        reader.close()
        if reader.ticket.options.scores is not None:  # thousands of entries
            return await asyncio.to_thread(view.whole, reader, pieces)
        return view.whole(reader, pieces)

    async def _stream(self, reader: Reader, pieces: list[Piece],
                      view: Completion | ResponseEvents) -> AsyncGenerator[bytes, None]:
        try:
            for event in view.begin(reader):
                yield event
            while True:
                for event in view.news(reader, pieces):
                    yield event
                if reader.over:
                    break
                pieces = await reader.next()
            for event in view.end(reader):
                yield event
        except SlipstreamError as error:
            logger.warning("the stream ended with an error: %s", error.message, extra={"request_id": reader.ticket.id})
            for event in view.failure(error):
                yield event

    # Tokens -----------------------------------------------------------------------------------------------------------

    async def _tokenize(self, request: Request) -> Response:
        deadline = self._deadline(request)
        asked = tokens.tokenize_request(await self._body(request, deadline))
        ids = await _unless_gone(request, self._service.tokens(asked.model or self._service.model_name,
                                                               partial(tokens.build, asked, self._service.builder), deadline,
                                                               request.state.client))
        words = map(self._service.builder.tokenizer.word, ids) if asked.wants_words else None
        return _respond({"count": len(ids), "max_model_len": self._service.max_context, "tokens": ids,
                         "token_strs": None if words is None else list(words)})

    async def _detokenize(self, request: Request) -> Response:
        deadline = self._deadline(request)
        model, ids = tokens.detokenize_request(await self._body(request, deadline), self._service.checkpoint.vocab_size)
        self._service.check_model(model or self._service.model_name)
        return _respond({"prompt": await asyncio.to_thread(self._service.builder.tokenizer.words, ids)})

    async def _openapi(self, request: Request) -> Response:
        return _respond(openapi.document())

    # Bodies, errors ---------------------------------------------------------------------------------------------------

    async def _body(self, request: Request, deadline: float) -> Any:
        limit = self._service.config.router.max_body_bytes
        too_large = RequestTooLargeError(f"the body is larger than {limit} bytes (router.max_body_bytes)")
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit:
                        raise too_large
        except TimeoutError as error:
            raise DeadlineError("the request's deadline passed before its body was complete") from error
        except ClientDisconnect as error:
            raise CancelledError("the client went away before its request was complete") from error
        return await asyncio.to_thread(openai.parse, body) if len(body) > 1 << 20 else openai.parse(body)

    def _deadline(self, request: Request) -> float:
        limit = self._service.config.router.request_timeout_seconds
        text = request.headers.get("x-request-timeout-seconds")
        if text is None:
            return time.monotonic() + limit
        if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text) or float(text) <= 0:
            raise InvalidRequestError("x-request-timeout-seconds must be a positive number of seconds",
                                      field="x-request-timeout-seconds")
        return time.monotonic() + min(limit, float(text))

    def _guard(self, path: str, endpoint: Endpoint) -> Endpoint:
        """Request id, error object and counters around every endpoint."""

        async def guarded(request: Request) -> Response:
            name, shown = _request_id(request)
            logs.request_id.set(name)
            try:
                if path not in self._open:
                    request.state.client = self._service.keys.client(request.headers.get("authorization"))
                response = await endpoint(request)
            except SlipstreamError as error:
                response = _failure(error)
            except Exception:
                logger.exception("a fault in %s", path)
                response = _failure(InternalError(f"a fault of the router; its log has more under request id {name}"))
            response.headers["x-request-id"] = shown
            if not isinstance(response, EventStream):
                self._count(path, response.status_code)
            return response

        return guarded

    def _count(self, path: str, status: int) -> None:
        """One request; a stream counts once it has ended, as what ended it."""
        self._service.metrics.requests.labels(path, str(status)).inc()

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        try:
            self._service.keys.client(request.headers.get("authorization"))
        except AuthenticationError as refusal:
            self._count("unmatched", refusal.http_status)
            response = _failure(refusal)
            response.headers["x-request-id"] = _request_id(request)[1]
            return response
        self._count("unmatched", error.status_code)
        what = "no such path" if error.status_code == 404 else "this path does not take that method"
        body = {"error": {"message": what, "type": "invalid_request_error", "param": None, "code": "not_found"}}
        return _respond(body, error.status_code, {**(error.headers or {}), "x-request-id": _request_id(request)[1]})


async def _unless_gone(request: Request, begin: Coroutine[Any, Any, T]) -> T:
    """Begin a request, unless its client leaves before its prompt is ready."""
    beginning, gone = asyncio.create_task(begin), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((beginning, gone), return_when=asyncio.FIRST_COMPLETED)
        if not beginning.done():
            raise CancelledError("the client went away")
        return beginning.result()
    finally:
        beginning.cancel()
        gone.cancel()
        await asyncio.gather(beginning, gone, return_exceptions=True)


async def _disconnect(request: Request, ticket: Ticket) -> None:
    """Give the request up when the client goes before it has an answer."""
    await _gone(request)
    ticket.generation.give_up(CancelledError("the client went away"))


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _respond(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_json.encode(body), status_code=status, media_type="application/json", headers=headers)


def _failure(error: SlipstreamError) -> Response:
    wait = error.retry_after_seconds
    if wait is None and error.http_status in (429, 503):
        wait = 1.0
    headers = {} if wait is None else {"retry-after": str(max(1, math.ceil(wait)))}
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return _respond(error_body(error), error.http_status, headers)


def _request_id(request: Request) -> tuple[str, str]:
    return request_names(request.headers.get("x-request-id", ""))
