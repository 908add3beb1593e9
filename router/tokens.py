"""The bodies of /tokenize and /detokenize, as vLLM has them. A refusal names its field, and never echoes input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from router import openai
from router.fields import as_object, as_text, boolean
from router.openai import ChatRequest
from router.prompt import Prompt, PromptBuilder
from slipstream.errors import InvalidRequestError


@dataclass(frozen=True, kw_only=True)
class TokenizeRequest:
    """POST /tokenize."""

    model: str
    """Empty: the one that is served."""
    of: str | ChatRequest
    wants_words: bool


def tokenize_request(body: Any) -> TokenizeRequest:
    """Raises InvalidRequestError naming the field."""
    fields = dict(as_object(body, "the body"))
    words, _ = boolean(fields, "return_token_strs"), boolean(fields, "add_special_tokens")  # Qwen's models add none
    if fields.get("add_generation_prompt") is False:
        raise InvalidRequestError("add_generation_prompt: false is not supported; leave it out", field="add_generation_prompt")
    model = as_text(fields.get("model") or "", "model")
    for name in ("return_token_strs", "add_special_tokens", "add_generation_prompt", "model"):
        fields.pop(name, None)
    if "messages" in fields:
        return TokenizeRequest(model=model, of=openai.chat_request({**fields, "model": model or "any"}), wants_words=words)
    if unknown := [name for name in fields if name != "prompt"]:
        raise InvalidRequestError(f"unknown field {unknown[0][:64]!r}; leave it out", field=unknown[0][:64])
    return TokenizeRequest(model=model, of=as_text(fields.get("prompt"), "prompt"), wants_words=words)


def build(request: TokenizeRequest, builder: PromptBuilder, take: Callable[[int], None]) -> Prompt:
    """The prompt; pictures count as they would in a request."""
    chat = request.of
    if isinstance(chat, str):
        return builder.text(chat)
    return builder.chat(chat.messages, take, chat.tools.shown, chat.template)


def detokenize_request(body: Any, vocab_size: int) -> tuple[str, list[int]]:
    """(model, tokens); the model is empty where none is named."""
    fields = as_object(body, "the body")
    if unknown := [name for name in fields if name not in ("model", "tokens")]:
        raise InvalidRequestError(f"unknown field {unknown[0][:64]!r}; leave it out", field=unknown[0][:64])
    given = fields.get("tokens")
    if not isinstance(given, list) or not all(type(token) is int and 0 <= token < vocab_size for token in given):
        raise InvalidRequestError(f"tokens must be a list of token ids below {vocab_size}", field="tokens")
    return as_text(fields.get("model") or "", "model"), given
