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
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from router import openai
from router.events import EventStream
from router.inspect import DETAILS
from router.reader import Piece, Reader
from router.service import RouterService, Ticket, new_request_id, report
from router.stream import DONE, Shape, error_body, event
from slipstream.errors import (
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

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NOTICE_SECONDS = 1.0
"""How long the server may take to say that a connection has broken, after a write on it failed."""
_json = msgspec.json.Encoder()
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

Endpoint = Callable[[Request], Awaitable[Response]]


class App:
    """Binds a RouterService to its routes."""

    def __init__(self, service: RouterService) -> None:
        self._service = service
        routes = [(_CHAT, self._chat, "POST"), (_COMPLETIONS, self._completion, "POST"),
                  ("/v1/models", self._models, "GET"), ("/v1/models/{name:path}", self._model, "GET"),
                  ("/health", self._health, "GET"), ("/live", self._live, "GET"), ("/metrics", self._metrics, "GET"),
                  ("/status", self._status, "GET"), ("/explain/{name:path}", self._explain, "GET")]
        self._routes = Starlette(
            routes=[Route(path, self._guard(path, endpoint), methods=[method]) for path, endpoint, method in routes],
            exception_handlers={HTTPException: self._no_route})

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
        begin = self._service.begin_chat(parsed, logs.request_id.get(), deadline)
        return await self._answer(request, await _unless_gone(request, begin), chat=True)

    async def _completion(self, request: Request) -> Response:
        deadline = self._deadline(request)
        parsed = openai.completion_request(await self._body(request, deadline))
        begin = self._service.begin_completion(parsed, logs.request_id.get(), deadline)
        return await self._answer(request, await _unless_gone(request, begin), chat=False)

    async def _answer(self, request: Request, ticket: Ticket, *, chat: bool) -> Response:
        shape = Shape(id=("chatcmpl-" if chat else "cmpl-") + ticket.id.rpartition("-")[2], model=self._service.model_name,
                      created=int(time.time()), chat=chat)
        wants_report = request.headers.get("x-slipstream-report") == "1"
        reader = Reader(self._service, ticket)
        watch = asyncio.create_task(_disconnect(request, ticket))
        try:
            if not ticket.options.stream:
                return _respond(await self._whole(reader, shape, wants_report))
            first: list[Piece] = []
            while not first:  # a failure before the first token still has its own status
                first = await reader.next()
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
            self._count(_CHAT if chat else _COMPLETIONS, 200 if end is None or end.error is None else end.error.http_status)

        return EventStream(self._stream(reader, first, shape, wants_report), ended=ticket.generation.wait, close=close)

    async def _whole(self, reader: Reader, shape: Shape, wants_report: bool) -> dict[str, Any]:
        pieces: list[list[Piece]] = [[] for _ in reader.ticket.texts]
        while not reader.over:
            for piece in await reader.next():
                pieces[piece.choice].append(piece)
        reader.close()
        choices = [("".join(piece.text for piece in of), of[-1].reason or "stop",
                    reader.logprobs([entry for piece in of for entry in piece.entries], chat=shape.chat)) for of in pieces]
        body = shape.whole(choices, reader.usage())
        return {**body, "slipstream": report(reader.ticket.generation)} if wants_report else body

    async def _stream(self, reader: Reader, pieces: list[Piece], shape: Shape,
                      wants_report: bool) -> AsyncGenerator[bytes, None]:
        asked = reader.ticket.options.include_usage
        begun: set[int] = set()
        try:
            while True:
                for piece in pieces:
                    told = reader.logprobs(piece.entries, chat=shape.chat)
                    if piece.choice not in begun or piece.text or piece.entries:
                        yield event(shape.chunk(piece.choice, piece.text, None, first=piece.choice not in begun, usage=asked,
                                                logprobs=told))
                    begun.add(piece.choice)
                    if piece.reason is not None:
                        last = shape.chunk(piece.choice, None, piece.reason, usage=asked)
                        if wants_report and reader.over and piece is pieces[-1]:
                            last["slipstream"] = report(reader.ticket.generation)
                        yield event(last)
                if reader.over:
                    break
                pieces = await reader.next()
            if asked:
                yield event(shape.usage_chunk(reader.usage()))
            yield DONE
        except SlipstreamError as error:
            logger.warning("the stream ended with an error: %s", error.message, extra={"request_id": reader.ticket.id})
            yield event(error_body(error))

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
        self._count("unmatched", error.status_code)
        what = "no such path" if error.status_code == 404 else "this path does not take that method"
        body = {"error": {"message": what, "type": "invalid_request_error", "param": None, "code": "not_found"}}
        return _respond(body, error.status_code, {**(error.headers or {}), "x-request-id": _request_id(request)[1]})


async def _unless_gone(request: Request, begin: Coroutine[Any, Any, Ticket]) -> Ticket:
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
    return _respond(error_body(error), error.http_status, headers)


def _request_id(request: Request) -> tuple[str, str]:
    """(ours, the client's to be returned): ours is unique, and begins with the client's if that is a sound one."""
    given = request.headers.get("x-request-id", "")
    unique = new_request_id()
    return (f"{given}-{unique}", given) if _CLIENT_ID.fullmatch(given) else (unique, unique)
