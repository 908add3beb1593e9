"""Bodies of /v1/responses to chat requests; knows no model. A refusal names the field as this API spells it.

Nothing is stored: a conversation is sent as a whole, with what the answers before held.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from router import openai
from router.fields import as_object, as_text
from router.messages import checked_message
from router.openai import ChatRequest
from slipstream.errors import InvalidRequestError

_LOGPROBS = "message.output_text.logprobs"
_SAME = frozenset({"model", "stream", "temperature", "top_p", "parallel_tool_calls", "top_logprobs", "seed", "stop", "min_p",
                   "stop_token_ids", "ignore_eos", "min_tokens", "top_k", "presence_penalty", "frequency_penalty", "priority",
                   "repetition_penalty", "logit_bias", "cache_salt", "chat_template_kwargs"})
_OWN = frozenset({"input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning", "include"})
_IGNORED = frozenset({"metadata", "store", "user", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options",
                      "prompt_cache_retention"})
_NEUTRAL: dict[str, tuple[Any, ...]] = {"truncation": ("disabled",), "background": (False,)}
_STATE = frozenset({"previous_response_id", "conversation", "prompt"})
_NAMES = (("max_completion_tokens", "max_output_tokens"), ("response_format.json_schema", "text.format"),
          ("response_format", "text.format"), ("reasoning_effort", "reasoning.effort"), ("].function.", "]."),
          ("messages", "input"))
"""What chat completions call it, and what this API does."""


@contextmanager
def own_names() -> Iterator[None]:
    """Refusals of a chat request's fields, in this API's words."""
    try:
        yield
    except InvalidRequestError as error:
        for chat, own in _NAMES:
            error.message = error.message.replace(chat, own)
            error.field = error.field and error.field.replace(chat, own)
        raise


def chat_request(body: Any) -> ChatRequest:
    """Raises InvalidRequestError."""
    fields = {name: value for name, value in as_object(body, "the body").items() if value is not None}
    for name, value in fields.items():
        if name in _STATE:
            raise InvalidRequestError(f"{name} needs responses that are stored, and none are; send the whole conversation as "
                                      "input", field=name)
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise InvalidRequestError(f"this value of {name} is not supported; leave the field out", field=name)
        if name not in _SAME | _OWN | _IGNORED and name not in _NEUTRAL:
            raise InvalidRequestError(f"unknown field {name[:64]!r}; leave it out", field=name[:64])
    chat = {name: value for name, value in fields.items() if name in _SAME}
    chat["max_completion_tokens"] = fields.get("max_output_tokens")
    chat["tools"], chat["tool_choice"] = _tools(fields.get("tools")), _choice(fields.get("tool_choice"))
    chat["response_format"] = _format(as_object(fields.get("text", {}), "text"))
    chat["reasoning_effort"] = as_object(fields.get("reasoning", {}), "reasoning").get("effort")
    include = fields.get("include", [])
    if not isinstance(include, list) or any(one != _LOGPROBS for one in include):
        raise InvalidRequestError(f"include may hold {_LOGPROBS} and nothing else", field="include")
    chat["logprobs"] = bool(include)
    as_object(fields.get("metadata", {}), "metadata")
    messages = _messages(fields.get("input"))
    if "instructions" in fields:
        messages.insert(0, {"role": "system", "content": as_text(fields["instructions"], "instructions")})
    return openai.chat_of(chat, messages)


def _messages(given: Any) -> list[dict[str, Any]]:
    """Items to messages: what a model said between two turns of others, thinking and calls too, is one message."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    messages: list[tuple[dict[str, Any], str]] = []
    for number, value in enumerate(openai.as_items(given, "input")):
        where = f"input[{number}]"
        item = as_object(value, where)
        said = _said(item, where)
        if said is None:
            messages.append((_heard(item, where), where))
        elif messages and messages[-1][0]["role"] == "assistant" and not ("content" in messages[-1][0] and "content" in said):
            before = messages[-1][0]
            calls = [*before.get("tool_calls", ()), *said.get("tool_calls", ())]
            before |= {**said, **({"tool_calls": calls} if calls else {})}
        else:
            messages.append(({"role": "assistant", **said}, where))
    return [checked_message(message, where) for message, where in messages]


def _said(item: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Part of an assistant's message; None: the item is somebody else's."""
    kind = item.get("type", "message")
    if kind == "function_call":
        return {"tool_calls": [{"id": item.get("call_id"), "function": {"name": item.get("name"),
                                                                       "arguments": item.get("arguments")}}]}
    if kind == "reasoning":
        parts = item.get("content") or []
        if not isinstance(parts, list):
            raise InvalidRequestError(f"{where}.content must be a list", field=f"{where}.content")
        texts = [as_text(as_object(part, f"{where}.content").get("text"), f"{where}.content") for part in parts]
        return {"reasoning_content": "".join(texts)}
    if kind == "message" and item.get("role") == "assistant":
        return {"content": _content(item.get("content"))}
    return None


def _heard(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
    if kind != "message":
        raise InvalidRequestError(f"{where}.type must be message, function_call, function_call_output or reasoning",
                                  field=f"{where}.type")
    return {"role": item.get("role"), "content": _content(item.get("content"))}


def _content(content: Any) -> Any:
    """Parts under the names that chat completions have for them; what is wrong with them is found there."""
    if not isinstance(content, list):
        return content
    return [_part(part) if isinstance(part, dict) else part for part in content]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "refusal"):
        return {"type": "text", "text": part.get("refusal" if kind == "refusal" else "text")}
    return {"type": "image_url", "image_url": {"url": part.get("image_url")}} if kind == "input_image" else part


def _tools(given: Any) -> Any:
    if not isinstance(given, list):
        return given
    return [{"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
            if isinstance(tool, dict) and tool.get("type") == "function" else tool for tool in given]


def _choice(given: Any) -> Any:
    if not isinstance(given, dict) or given.get("type") != "function":
        return given
    return {"type": "function", "function": {"name": given.get("name")}}


def _format(text: Mapping[str, Any]) -> Any:
    form = text.get("format")
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}
