"""Messages of the public gRPC API to the bodies that `router.openai` checks, and answers and errors back. Knows no call.

Both APIs refuse the same things with the same words; a field is named as its caller spells it.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from google.protobuf.message import Message

from router import openai
from router.logprobs import FLOOR
from router.openai import ChatRequest, CompletionRequest, Options
from router.reader import Piece
from router.reasoning import Content, Reasoning
from slipstream.errors import InternalError, InvalidRequestError, SlipstreamError
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import Logprobs, PromptLogprobs
from slipstream_client.v1 import inference_pb2 as pb
from slipstream_client.v1 import status_pb2

DOMAIN = "slipstream"
MAX_ERROR_CHARACTERS = 600
"""Trailing metadata is short: 8 KiB by default."""
SCORES_OF_A_MESSAGE = 256
"""Tokens of a prompt: with 20 others each they take 200 KiB, and nobody else's time."""
_TYPES = "type.googleapis.com/google.rpc."
_MAGIC = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"BM", "bmp"), (b"RIFF", "webp"))
_ROLES = {pb.ROLE_SYSTEM: "system", pb.ROLE_USER: "user", pb.ROLE_ASSISTANT: "assistant"}
_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed")
_PATHS = {**{name: f"sampling.{name}" for name in (*_SAMPLING, "logit_bias")}, "stop": "stop.strings",
          "stop_token_ids": "stop.token_ids", "top_logprobs": "logprobs",
          **{name: f"stop.{name}" for name in ("max_tokens", "ignore_eos", "min_tokens")}}
"""Fields that the two APIs spell differently."""


def generate_request(request: pb.GenerateRequest, model: str) -> CompletionRequest:
    """`model`: the one meant where none is named. Raises InvalidRequestError."""
    _bound(len(request.tokens.ids), "tokens")
    prompt = list(request.tokens.ids) if request.WhichOneof("prompt") == "tokens" else request.text
    parsed = openai.completion_request({"prompt": prompt, **_options(request, model)})
    parsed = replace(parsed, options=_with_scores(parsed.options, request))
    if not request.HasField("logprobs"):
        return parsed
    if request.logprobs > openai.MAX_CHAT_LOGPROBS:  # text completions of OpenAI have fewer than chat
        raise InvalidRequestError(f"logprobs must be an integer from 0 to {openai.MAX_CHAT_LOGPROBS}", field="logprobs")
    options = parsed.options
    return replace(parsed, options=replace(options, sampling={**options.sampling, "logprobs": request.logprobs}))


def chat_request(request: pb.ChatRequest, model: str) -> ChatRequest:
    """The same for a conversation."""
    logprobs: dict[str, Any] = {"logprobs": True, "top_logprobs": request.logprobs} if request.HasField("logprobs") else {}
    parsed = openai.chat_request({"messages": messages(request.messages), **_options(request, model), **logprobs})
    return replace(parsed, options=_with_scores(parsed.options, request))


def _with_scores(options: Options, request: pb.GenerateRequest | pb.ChatRequest) -> Options:
    """This API streams them."""
    if not request.HasField("prompt_logprobs"):
        return options
    if request.prompt_logprobs > openai.MAX_CHAT_LOGPROBS:
        raise InvalidRequestError(f"prompt_logprobs must be an integer from 0 to {openai.MAX_CHAT_LOGPROBS}",
                                  field="prompt_logprobs")
    return replace(options, prompt_logprobs=request.prompt_logprobs)


def messages(given: Sequence[pb.Message]) -> list[dict[str, Any]]:
    """Messages as OpenAI has them, not checked yet."""
    _bound(sum(len(one.parts) + sum(len(part.video.frames) for part in one.parts) for one in given[:openai.MAX_MESSAGES + 1]),
           "messages")
    return [{"role": _ROLES.get(one.role), "content": _content(one)} for one in given[:openai.MAX_MESSAGES + 1]]


def _content(message: pb.Message) -> str | list[dict[str, Any]]:
    parts = message.parts
    return parts[0].text if len(parts) == 1 and parts[0].WhichOneof("part") == "text" else [_part(part) for part in parts]


def _part(part: pb.Part) -> dict[str, Any]:
    match part.WhichOneof("part"):
        case "text":
            return {"type": "text", "text": part.text}
        case "image":
            return {"type": "image_url", "image_url": {"url": _url(part.image)}}
        case "video":
            video: dict[str, Any] = {"type": "video", "video": [_url(frame) for frame in part.video.frames]}
            if part.video.WhichOneof("clock") == "fps":
                video["fps"] = part.video.fps
            elif part.video.WhichOneof("clock") == "timestamps":
                video["timestamps"] = list(part.video.timestamps.seconds)
            return video
    return {"type": None}


def _url(image: pb.Image) -> str:
    if image.WhichOneof("source") == "url":
        return image.url
    kind = next((name for magic, name in _MAGIC if image.data.startswith(magic)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(image.data).decode()}"


def _options(request: pb.GenerateRequest | pb.ChatRequest, model: str) -> dict[str, Any]:
    sampling, stop = request.sampling, request.stop
    for field, values in (("sampling.logit_bias", sampling.logit_bias), ("stop.strings", stop.strings),
                          ("stop.token_ids", stop.token_ids)):
        _bound(len(values), field)
    body = {name: getattr(sampling, name) for name in _SAMPLING if sampling.HasField(name)}  # type: ignore[arg-type]
    return {
        **body, "model": request.model or model, "stream": True, "n": request.n or 1, "priority": request.priority,
        "cache_salt": request.cache_salt, "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
        "max_tokens": stop.max_tokens if stop.HasField("max_tokens") else None, "stop": list(stop.strings),
        "stop_token_ids": list(stop.token_ids), "ignore_eos": stop.ignore_eos, "min_tokens": stop.min_tokens}


def _bound(count: int, field: str) -> None:
    """What is gone through one by one holds nobody else up for long."""
    if count > openai.MAX_VALUES:
        raise InvalidRequestError(f"{field} holds {count} values; the limit is {openai.MAX_VALUES}", field=field)


# Answers --------------------------------------------------------------------------------------------------------------


def deltas(piece: Piece, tokenizer: Tokenizer, *, chat: bool) -> list[pb.Delta]:
    """What is new of one choice; in a chat thinking and answer apart, and the text without their marks."""
    made = [pb.Delta(choice=piece.choice, text=piece.text)] if piece.text and not chat else []
    for part in piece.parts if chat else ():
        match part:
            case Reasoning():
                made.append(pb.Delta(choice=piece.choice, reasoning=part.text))
            case Content():
                made.append(pb.Delta(choice=piece.choice, text=part.text))
            case _:  # no request of this API offers tools
                raise InternalError("a call that nobody offered a tool for")
    if not made and (piece.entries or piece.reason):
        made = [pb.Delta(choice=piece.choice)]
    if made:
        made[0].logprobs.extend(_entry(entry.token, told, tokenizer) for entry in piece.entries
                                if (told := entry.logprobs) is not None)
        made[-1].finish_reason = _REASONS[piece.reason] if piece.reason is not None else pb.FINISH_REASON_UNSPECIFIED
    return made


def prompt_logprobs(tokens: Sequence[int], told: PromptLogprobs, tokenizer: Tokenizer) -> Iterator[list[pb.TokenLogprobs]]:
    """Of a prompt's tokens but the first, in parts of a size that every client takes."""
    part: list[pb.TokenLogprobs] = []
    for number, token in enumerate(tokens[1:]):
        part.append(_entry(token, told.row(number), tokenizer, told.ranks[number]))
        if len(part) == SCORES_OF_A_MESSAGE:
            yield part
            part = []
    yield part


def _entry(token: int, told: Logprobs, tokenizer: Tokenizer, rank: int = 0) -> pb.TokenLogprobs:
    def one(token: int, logprob: float) -> pb.TokenLogprob:
        return pb.TokenLogprob(token=token, text=tokenizer.token_bytes(token), logprob=max(logprob, FLOOR))

    return pb.TokenLogprobs(token=one(token, told.logprob), top=[one(*top) for top in told.top], rank=rank)


def usage(told: dict[str, Any]) -> pb.Usage:
    """From OpenAI's usage object."""
    return pb.Usage(prompt_tokens=told["prompt_tokens"], completion_tokens=told["completion_tokens"],
                    cached_tokens=told["prompt_tokens_details"]["cached_tokens"],
                    reasoning_tokens=told.get("completion_tokens_details", {}).get("reasoning_tokens"))


def load(status: dict[str, Any]) -> pb.GetLoadResponse:
    """From RouterService.status."""
    rows = []
    for one in status["replicas"]:
        load = one.get("load", {})
        rows.append(pb.Replica(id=one["replica_id"], role=one["role"], state=one["state"],
                               total_blocks=one.get("total_blocks", 0),
                               **{key: load.get(key, 0) for key in ("waiting", "running", "parked", "free_blocks")}))
    return pb.GetLoadResponse(problem=status["problem"], in_flight=status["in_flight"], max_in_flight=status["max_in_flight"],
                              replicas=rows)


# Errors ---------------------------------------------------------------------------------------------------------------


def status(error: SlipstreamError, code: int, request_id: str) -> status_pb2.Status:
    """google.rpc.Status of an error; `code`: the number of its gRPC status."""
    result = status_pb2.Status(code=code, message=short(error.message))
    _add(result, status_pb2.ErrorInfo(reason=error.code.upper(), domain=DOMAIN))
    _add(result, status_pb2.RequestInfo(request_id=request_id))
    if error.field is not None:
        violation = status_pb2.BadRequest.FieldViolation(field=field_path(error.field), description=short(error.message))
        _add(result, status_pb2.BadRequest(field_violations=[violation]))
    if (wait := retry_after(error)) is not None:
        info = status_pb2.RetryInfo()
        info.retry_delay.FromMilliseconds(math.ceil(wait * 1000))
        _add(result, info)
    return result


def _add(result: status_pb2.Status, detail: Message) -> None:
    result.details.add(type_url=_TYPES + detail.DESCRIPTOR.name, value=detail.SerializeToString())


def retry_after(error: SlipstreamError) -> float | None:
    """Seconds after which the same request may go well; None: never."""
    return (error.retry_after_seconds or 1.0) if error.http_status in (429, 503) else None


def field_path(field: str) -> str:
    """How the public messages spell a field of an OpenAI body."""
    return _PATHS.get(field) or re.sub(r"\.content\b", ".parts", re.sub(r"(\.content\[\d+\]).*", r"\1", field))


def short(text: str) -> str:
    """An error's text, cut where it is too long for a trailer."""
    return text if len(text) <= MAX_ERROR_CHARACTERS else f"{text[:MAX_ERROR_CHARACTERS]}..."
