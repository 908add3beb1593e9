"""OpenAI request bodies to checked requests; knows no model and no HTTP. A refusal names its field, and never echoes input.

A field that would change the answer and is not supported is refused; one that changes nothing is accepted and ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from router import formats, structured
from router.fields import as_object, boolean, integer, number
from router.functions import Tools, tools
from router.messages import checked_message
from slipstream.errors import InvalidRequestError

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1024
MAX_MESSAGES = 4096
MAX_VALUES = 1 << 19
"""Commas and opening brackets of a body, in texts too: parsing takes time by values, and nobody else runs meanwhile."""
_MAX_SEED = 1 << 63
MAX_CHAT_LOGPROBS = 20
MAX_TEXT_LOGPROBS = 5
MAX_BIASES = 1024
MAX_CHOICES = 16
MAX_TEMPLATE_VALUES = 16
MAX_SALT_CHARACTERS = 256
MAX_PRIORITY = 100
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")

# field -> the values that change nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",), "functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],),
    "web_search_options": (), "audio": (), "prediction": (), "chat_template": (),
    "guided_json": (), "guided_regex": (), "image_embeds": (), "prompt_embeds": (),
}
_IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier",
                      "prompt_cache_key", "verbosity"})
_COMMON = frozenset({"model", "stream", "stream_options", "temperature", "top_p", "seed", "max_tokens", "stop",
                     "stop_token_ids", "ignore_eos", "min_tokens", "top_k", "min_p",
                     "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "n", "best_of",
                     "cache_salt", "priority", "response_format", "prompt_logprobs"})
_CHAT = _COMMON | {"messages", "top_logprobs", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls",
                   "chat_template_kwargs", "reasoning_effort"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What chat and text completions have in common; None: not given."""

    model: str
    stream: bool
    include_usage: bool
    sampling: dict[str, Any]
    """The fields of SamplingParams that are given."""
    max_tokens: int | None
    """0: no output is wanted, of a text completion."""
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    min_tokens: int = 0
    n: int = 1
    """Choices."""
    priority: int = 0
    """Lower goes first."""
    cache_salt: str = ""
    """Requests of different salts share no cached prompt."""
    grammar: str | None = None
    """The form of the answer; None: it is free."""
    prompt_logprobs: int | None = None
    """Most probable tokens to tell with each of the prompt's, as vLLM does."""
    echo_logprobs: int | None = None
    """The same for an echoed prompt, as OpenAI does."""

    @property
    def scores(self) -> int | None:
        """The same as workers are asked for it: for both."""
        return max((one for one in (self.prompt_logprobs, self.echo_logprobs) if one is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """POST /v1/chat/completions."""

    options: Options
    messages: list[dict[str, Any]]
    tools: Tools
    template: dict[str, Any]
    """What the template is told besides; whether it knows that is for the caller to check."""


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """POST /v1/completions."""

    options: Options
    prompt: str | list[int]
    echo: bool = False
    """The text begins with the prompt's."""


def parse(body: bytes | bytearray) -> Any:
    """A body's JSON. Raises InvalidRequestError, also for half of a surrogate pair: no tokenizer takes it, nor any encoder."""
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise InvalidRequestError(f"the body holds more than {MAX_VALUES} values, counted by commas and opening brackets; send "
                                  "a shorter prompt")
    try:
        value = json.loads(body.decode())
        if _HALF.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("a text of the body holds half of a surrogate pair (\\ud800 to \\udfff); send whole "
                                  "characters") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("the body is not valid JSON") from error
    return value


def chat_request(body: Any) -> ChatRequest:
    """Raises InvalidRequestError naming the field."""
    fields = as_object(body, "the body")
    _check_fields(fields, _CHAT)
    messages = as_items(fields.get("messages"), "messages")
    return chat_of(fields, [checked_message(item, f"messages[{i}]") for i, item in enumerate(messages)])


def as_items(value: Any, field: str) -> list[Any]:
    """A conversation's items. Raises InvalidRequestError."""
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(f"{field} must be a list of at least one item", field=field)
    if len(value) > MAX_MESSAGES:
        raise InvalidRequestError(f"{field} holds {len(value)} items; the limit is {MAX_MESSAGES}", field=field)
    return value


def chat_of(fields: Mapping[str, Any], messages: list[dict[str, Any]]) -> ChatRequest:
    """Of checked messages; the names of `fields` are known. Raises InvalidRequestError naming the field."""
    offered = tools(fields)
    structured.refuse_tools(offered.structure)
    return ChatRequest(options=_options(fields, _chat_logprobs(fields)), messages=messages, tools=offered,
                       template=_template(fields))


def completion_request(body: Any) -> CompletionRequest:
    """Raises InvalidRequestError naming the field."""
    fields = as_object(body, "the body")
    _check_fields({name: value for name, value in fields.items() if (name, value) != ("top_logprobs", 0)},
                  _COMMON | {"prompt", "echo"})
    logprobs, echo = _text_logprobs(fields), boolean(fields, "echo")
    options = replace(_options(fields, logprobs, least=0), echo_logprobs=logprobs if echo else None)
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return CompletionRequest(options=options, prompt=prompt, echo=echo)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return CompletionRequest(options=options, prompt=prompt, echo=echo)
    raise InvalidRequestError("prompt must be one non-empty string, or one non-empty list of token ids; send several prompts "
                              "as several requests", field="prompt")


def _check_fields(fields: Mapping[str, Any], known: frozenset[str]) -> None:
    for name, value in fields.items():
        if name in known or name in _IGNORED or value is None:
            continue
        if name not in _NEUTRAL:
            raise InvalidRequestError(f"unknown field {name[:64]!r}; leave it out", field=name[:64])
        if not any((type(value) is type(neutral) and value == neutral) or _samenumber(value, neutral)
                   for neutral in _NEUTRAL[name]):
            raise InvalidRequestError(f"this value of {name} is not supported; leave the field out", field=name)


def _samenumber(value: Any, neutral: Any) -> bool:
    numbers = isinstance(value, int | float) and isinstance(neutral, int | float)
    return numbers and not isinstance(value, bool) and not isinstance(neutral, bool) and value == neutral


def _options(fields: Mapping[str, Any], logprobs: int | None, least: int = 1) -> Options:
    """`least`: of max_tokens."""
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidRequestError("model must be the name of a model; GET /v1/models lists them", field="model")
    stream = boolean(fields, "stream")
    form = structured.response_format(fields.get("response_format"), "response_format")
    max_tokens = _max_tokens(fields, least)
    return Options(
        model=model, stream=stream, include_usage=_include_usage(fields, stream),
        sampling=_sampling(fields, logprobs), max_tokens=max_tokens, stop=_stop(fields),
        stop_token_ids=_stop_token_ids(fields), ignore_eos=boolean(fields, "ignore_eos"),
        min_tokens=_min_tokens(fields, max_tokens), prompt_logprobs=_prompt_logprobs(fields, stream),
        n=_choices(fields), cache_salt=_cache_salt(fields), grammar=formats.grammar_of(form, fields),
        priority=integer(fields, "priority", -MAX_PRIORITY, MAX_PRIORITY) or 0)


def _sampling(fields: Mapping[str, Any], logprobs: int | None) -> dict[str, Any]:
    top_k = integer(fields, "top_k", -1, 1 << 31)
    asked = {
        "temperature": number(fields, "temperature", 0.0, 2.0), "top_p": number(fields, "top_p", 0.0, 1.0, open_low=True),
        "top_k": None if top_k is None else max(0, top_k), "min_p": number(fields, "min_p", 0.0, 1.0),
        "presence_penalty": number(fields, "presence_penalty", -2.0, 2.0),
        "frequency_penalty": number(fields, "frequency_penalty", -2.0, 2.0),
        "repetition_penalty": number(fields, "repetition_penalty", 1e-6, 10.0),
        "logit_bias": _logit_bias(fields), "logprobs": logprobs, "seed": integer(fields, "seed", -_MAX_SEED, _MAX_SEED - 1)}
    return {name: value for name, value in asked.items() if value is not None}


def _chat_logprobs(fields: Mapping[str, Any]) -> int | None:
    top = integer(fields, "top_logprobs", 0, MAX_CHAT_LOGPROBS)
    if boolean(fields, "logprobs"):
        return top or 0
    if top:
        raise InvalidRequestError("top_logprobs needs logprobs: true", field="top_logprobs")
    return None


def _text_logprobs(fields: Mapping[str, Any]) -> int | None:
    return None if fields.get("logprobs") is False else integer(fields, "logprobs", 0, MAX_TEXT_LOGPROBS)


def _prompt_logprobs(fields: Mapping[str, Any], stream: bool) -> int | None:
    found = None if fields.get("prompt_logprobs") is False else integer(fields, "prompt_logprobs", 0, MAX_CHAT_LOGPROBS)
    if found is not None and stream:
        raise InvalidRequestError("prompt_logprobs are not streamed; set stream to false", field="prompt_logprobs")
    return found


def _choices(fields: Mapping[str, Any]) -> int:
    n, best_of = integer(fields, "n", 1, MAX_CHOICES) or 1, integer(fields, "best_of", 1, MAX_CHOICES)
    if best_of is not None and best_of != n:
        raise InvalidRequestError(f"best_of ({best_of}) other than n ({n}) is not supported; leave it out", field="best_of")
    return n


def _template(fields: Mapping[str, Any]) -> dict[str, Any]:
    given, effort = fields.get("chat_template_kwargs") or {}, fields.get("reasoning_effort")
    if not isinstance(given, dict) or len(given) > MAX_TEMPLATE_VALUES or not all(
            isinstance(value, bool | int | float | str | None) for value in given.values()):
        raise InvalidRequestError(f"chat_template_kwargs must be an object of at most {MAX_TEMPLATE_VALUES} texts, numbers, "
                                  "true or false", field="chat_template_kwargs")
    if effort is not None and not isinstance(effort, str):
        raise InvalidRequestError("reasoning_effort must be a string", field="reasoning_effort")
    return given if effort is None else {**given, "reasoning_effort": effort}


def _cache_salt(fields: Mapping[str, Any]) -> str:
    salt = fields.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and len(salt) <= MAX_SALT_CHARACTERS):
        raise InvalidRequestError(f"cache_salt must be a string of at most {MAX_SALT_CHARACTERS} characters",
                                  field="cache_salt")
    return salt or ""


def _min_tokens(fields: Mapping[str, Any], most: int | None) -> int:
    least = integer(fields, "min_tokens", 0, 1 << 31) or 0
    if most is not None and least > most:
        raise InvalidRequestError(f"min_tokens ({least}) is more than max_tokens ({most})", field="min_tokens")
    return least


def _logit_bias(fields: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    """Whether the ids are in the vocabulary is for the caller to check."""
    biases = fields.get("logit_bias")
    if biases is None:
        return ()
    if not isinstance(biases, dict) or len(biases) > MAX_BIASES or not all(_TOKEN_ID.fullmatch(id) for id in biases):
        raise InvalidRequestError(f"logit_bias must be an object of at most {MAX_BIASES} token ids with their biases",
                                  field="logit_bias")
    found = {}
    for id, value in biases.items():
        if type(value) not in (int, float) or not -100 <= value <= 100:
            raise InvalidRequestError("logit_bias must give every token a number from -100 to 100", field="logit_bias")
        found[int(id)] = float(value)
    return tuple(sorted(found.items()))


def _include_usage(fields: Mapping[str, Any], stream: bool) -> bool:
    options = fields.get("stream_options")
    if options is None:
        return False
    if not stream:
        raise InvalidRequestError("stream_options is for streamed requests; set stream to true", field="stream_options")
    options = as_object(options, "stream_options")
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            raise InvalidRequestError(f"unknown field stream_options.{name[:64]}", field="stream_options")
    return boolean(options, "include_usage", "stream_options.")


def _max_tokens(fields: Mapping[str, Any], least: int) -> int | None:
    old = integer(fields, "max_tokens", least, 1 << 31)
    new = integer(fields, "max_completion_tokens", least, 1 << 31)
    if old is not None and new is not None and old != new:
        raise InvalidRequestError("max_tokens and max_completion_tokens differ; give one", field="max_completion_tokens")
    return old if new is None else new


def _stop(fields: Mapping[str, Any]) -> tuple[str, ...]:
    stop = fields.get("stop")
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(
            isinstance(one, str) and 0 < len(one) <= MAX_STOP_CHARACTERS for one in stops):
        raise InvalidRequestError(f"stop must be a non-empty string or a list of at most {MAX_STOPS}, each of at most "
                                  f"{MAX_STOP_CHARACTERS} characters", field="stop")
    return tuple(stops)


def _stop_token_ids(fields: Mapping[str, Any]) -> tuple[int, ...]:
    ids = fields.get("stop_token_ids")
    if ids is None:
        return ()
    if not isinstance(ids, list) or len(ids) > 64 or not all(type(one) is int and 0 <= one < 1 << 31 for one in ids):
        raise InvalidRequestError("stop_token_ids must be a list of at most 64 token ids", field="stop_token_ids")
    return tuple(ids)
