"""Requests to messages, and messages to results; knows no connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TypeVar

from slipstream_client import types
from slipstream_client.errors import IncompleteError, InvalidRequestError, Violation
from slipstream_client.types import Answer, ChatRequest, Choice, Delta, FinishReason, GenerateRequest, Options, TokenLogprob
from slipstream_client.v1 import inference_pb2 as pb

_ROLES = {"system": pb.ROLE_SYSTEM, "user": pb.ROLE_USER, "assistant": pb.ROLE_ASSISTANT}
_REASONS: dict[int, FinishReason | None] = {
    pb.FINISH_REASON_UNSPECIFIED: None, pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}

R = TypeVar("R", pb.GenerateRequest, pb.ChatRequest)


def generate_request(request: GenerateRequest) -> pb.GenerateRequest:
    """Raises InvalidRequestError for values that the message cannot hold."""
    try:
        message = pb.GenerateRequest()
        if isinstance(request.prompt, str):
            message.text = request.prompt
        else:
            message.tokens.ids.extend(request.prompt)
        return _with_options(message, request)
    except (TypeError, ValueError, AttributeError) as error:
        raise _unfit(error) from error


def chat_request(request: ChatRequest) -> pb.ChatRequest:
    """The same for a conversation."""
    try:
        return _with_options(pb.ChatRequest(messages=messages(request.messages)), request)
    except (TypeError, ValueError, AttributeError) as error:
        raise _unfit(error) from error


def tokenize_request(given: str | Sequence[types.Message], model: str) -> pb.TokenizeRequest:
    """The same for a text or a conversation."""
    try:
        if isinstance(given, str):
            return pb.TokenizeRequest(model=model, text=given)
        return pb.TokenizeRequest(model=model, conversation=pb.Conversation(messages=messages(given)))
    except (TypeError, ValueError, AttributeError) as error:
        raise _unfit(error) from error


def _unfit(error: Exception) -> InvalidRequestError:
    return InvalidRequestError(f"the request holds a value of the wrong type or size: {error}",
                               violations=(Violation(field="", description=str(error)),))


def _with_options(message: R, request: Options) -> R:
    sampling, stop = request.sampling, request.stop
    message.model, message.n, message.priority, message.cache_salt = (request.model, request.n, request.priority,
                                                                      request.cache_salt)
    if request.logprobs is not None:
        message.logprobs = request.logprobs
    if request.prompt_logprobs is not None:
        message.prompt_logprobs = request.prompt_logprobs
    drawn = {one.name: getattr(sampling, one.name) for one in fields(sampling)}
    message.sampling.CopyFrom(pb.Sampling(**drawn))
    message.stop.CopyFrom(pb.Stop(max_tokens=stop.max_tokens, strings=stop.strings, token_ids=stop.token_ids,
                                  ignore_eos=stop.ignore_eos, min_tokens=stop.min_tokens))
    return message


def messages(given: Iterable[types.Message]) -> list[pb.Message]:
    """Of a conversation."""
    return [pb.Message(role=_ROLES.get(one.role, pb.ROLE_UNSPECIFIED),
                       parts=[_part(part) for part in ((one.parts,) if isinstance(one.parts, str) else one.parts)])
            for one in given]


def _part(part: str | types.Image | types.Video) -> pb.Part:
    if isinstance(part, str):
        return pb.Part(text=part)
    if isinstance(part, types.Image):
        return pb.Part(image=_image(part))
    video = pb.Video(frames=[_image(frame) for frame in part.frames])
    if part.timestamps is not None:
        video.timestamps.seconds.extend(part.timestamps)
    elif part.fps is not None:
        video.fps = part.fps
    return pb.Part(video=video)


def _image(image: types.Image) -> pb.Image:
    return pb.Image(url=image.data) if isinstance(image.data, str) else pb.Image(data=image.data)


def _logprob(told: pb.TokenLogprob, top: Iterable[pb.TokenLogprob] = (), rank: int = 0) -> TokenLogprob:
    return TokenLogprob(token=told.token, text=told.text, logprob=told.logprob, top=tuple(_logprob(one) for one in top),
                        rank=rank)


def model(told: pb.Model) -> types.Model:
    """What a router serves."""
    return types.Model(id=told.id, max_context=told.max_context, takes_images=told.takes_images,
                       takes_videos=told.takes_videos, created=told.created)


def load(told: pb.GetLoadResponse) -> types.Load:
    """How much a router has to do."""
    replicas = tuple(types.Replica(**{one.name: getattr(row, one.name) for one in fields(types.Replica)})
                     for row in told.replicas)
    return types.Load(problem=told.problem, in_flight=told.in_flight, max_in_flight=told.max_in_flight, replicas=replicas)


class Collector:
    """The messages of one streamed answer: their deltas one by one, and in the end all of it."""

    def __init__(self) -> None:
        self.request_id = ""
        self._deltas: deque[Delta] = deque()
        self._texts: dict[int, list[str]] = {}
        self._thoughts: dict[int, list[str]] = {}
        self._logprobs: dict[int, list[TokenLogprob]] = {}
        self._reasons: dict[int, FinishReason] = {}
        self._prompt: list[TokenLogprob] = []
        self._usage: types.Usage | None = None

    def add(self, message: pb.GenerateResponse | pb.ChatResponse) -> None:
        """A message has come."""
        self._prompt += [_logprob(one.token, one.top, one.rank) for one in message.prompt_logprobs]
        self._deltas.extend(Delta(choice=told.choice, text=told.text, reasoning=told.reasoning,
                                  finish_reason=_REASONS.get(told.finish_reason, "other"),
                                  logprobs=tuple(_logprob(one.token, one.top) for one in told.logprobs))
                            for told in message.deltas)
        if message.HasField("usage"):
            told = message.usage
            self._usage = types.Usage(prompt_tokens=told.prompt_tokens, completion_tokens=told.completion_tokens,
                                      cached_tokens=told.cached_tokens,
                                      reasoning_tokens=told.reasoning_tokens if told.HasField("reasoning_tokens") else None)

    def take(self) -> Delta | None:
        """The next delta that has come."""
        if not self._deltas:
            return None
        delta = self._deltas.popleft()
        self._texts.setdefault(delta.choice, []).append(delta.text)
        self._thoughts.setdefault(delta.choice, []).append(delta.reasoning)
        self._logprobs.setdefault(delta.choice, []).extend(delta.logprobs)
        if delta.finish_reason is not None:
            self._reasons[delta.choice] = delta.finish_reason
        return delta

    def text(self, choice: int) -> str:
        """Of the deltas that were taken."""
        return "".join(self._texts.get(choice, ()))

    def answer(self) -> Answer:
        """Raises IncompleteError for an answer without its end."""
        if self._usage is None or self._texts.keys() != self._reasons.keys():
            raise IncompleteError("the answer ended before it was complete", request_id=self.request_id)
        choices = tuple(Choice(text="".join(self._texts[i]), reasoning="".join(self._thoughts[i]),
                               finish_reason=self._reasons[i], logprobs=tuple(self._logprobs[i]))
                        for i in sorted(self._texts))
        return Answer(choices=choices, usage=self._usage, request_id=self.request_id, prompt_logprobs=tuple(self._prompt))
