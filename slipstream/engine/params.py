"""What sampling and stop parameters a request may have; knows no sequence's state and no tensor."""

from __future__ import annotations

from math import inf, isfinite

from slipstream.engine.sequence import GenerationRequest
from slipstream.errors import InvalidRequestError

MAX_LOGPROBS = 20


def check_params(request: GenerationRequest, vocab_size: int, max_choices: int) -> None:
    """Raises InvalidRequestError naming the field. NaN is in no range."""
    sampling, stop = request.sampling, request.stop
    choices = request.choices
    if not choices or list(choices) != sorted(set(choices)) or choices[0] < 0:
        raise InvalidRequestError(f"choices must be ascending numbers, not {choices}", field="n")
    if len(choices) > max_choices:
        raise InvalidRequestError(f"{len(choices)} choices; this replica runs {max_choices} sequences at once "
                                  "(engine.max_running)", field="n")
    if request.output and len(choices) > 1:
        raise InvalidRequestError("only one choice at a time can be resumed", field="output")
    if request.images and len(request.images) != len(request.grids):
        raise InvalidRequestError(f"{len(request.grids)} image grids and {len(request.images)} content hashes", field="images")
    _within("temperature", sampling.temperature, 0, inf)
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequestError(f"top_p must be in (0, 1], not {sampling.top_p}", field="top_p")
    _within("top_k", sampling.top_k, 0, inf)
    _within("min_p", sampling.min_p, 0, 1)
    _within("presence_penalty", sampling.presence_penalty, -inf, inf)
    _within("frequency_penalty", sampling.frequency_penalty, -inf, inf)
    _within("repetition_penalty", sampling.repetition_penalty, 1e-7, 1e7)  # beyond, a penalised logit is no number any more
    if sampling.logprobs is not None:
        _within("logprobs", sampling.logprobs, 0, MAX_LOGPROBS)
    if request.prompt_logprobs is not None:
        _within("prompt_logprobs", request.prompt_logprobs, 0, MAX_LOGPROBS)
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(f"logit_bias names token {token}; the vocabulary has {vocab_size}", field="logit_bias")
        _within("logit_bias", bias, -inf, inf)
    if len({token for token, _ in sampling.logit_bias}) < len(sampling.logit_bias):
        raise InvalidRequestError("logit_bias names a token twice", field="logit_bias")
    if stop.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens must be at least 1, not {stop.max_tokens}", field="max_tokens")
    if not 0 <= stop.min_tokens <= stop.max_tokens:
        raise InvalidRequestError(f"min_tokens must be from 0 to max_tokens ({stop.max_tokens}), not {stop.min_tokens}",
                                  field="min_tokens")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not (isfinite(value) and low <= value <= high):
        raise InvalidRequestError(f"{name} must be a number from {low} to {high}, not {value}", field=name)
