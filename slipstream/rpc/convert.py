"""Our types to protobuf messages of the Worker service and back; knows neither side's logic."""

from __future__ import annotations

import math

from slipstream import errors
from slipstream.errors import InternalError, InvalidRequestError, SlipstreamError
from slipstream.types import EngineLoad, FinishReason, Grammar, Grid, Logprobs, PromptLogprobs, Role, SamplingParams, StopParams
from slipstream.v1 import worker_pb2 as pb

CONTENT_HASH_BYTES = 16
LEAST_TOP_P = 1e-30

_ROLES = {Role.PREFILL: pb.ROLE_PREFILL, Role.DECODE: pb.ROLE_DECODE}
_REASONS = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}

# The most specific kind first: an error takes the first row that it is an instance of.
_CODES: tuple[tuple[type[SlipstreamError], pb.ErrorCode.ValueType], ...] = (
    (errors.LeaseExpiredError, pb.ERROR_CODE_LEASE_EXPIRED),
    (errors.PreemptedError, pb.ERROR_CODE_PREEMPTED),
    (errors.BusyError, pb.ERROR_CODE_BUSY),
    (errors.IncompatibleError, pb.ERROR_CODE_INCOMPATIBLE),
    (errors.UnavailableError, pb.ERROR_CODE_UNAVAILABLE),
    (errors.TransferError, pb.ERROR_CODE_UNAVAILABLE),
    (errors.OverloadedError, pb.ERROR_CODE_BUSY),
    (errors.DeadlineError, pb.ERROR_CODE_DEADLINE),
    (errors.CancelledError, pb.ERROR_CODE_CANCELLED),
    (errors.ContextLengthError, pb.ERROR_CODE_CONTEXT_LENGTH),
    (errors.InvalidRequestError, pb.ERROR_CODE_INVALID),
    (errors.RequestTooLargeError, pb.ERROR_CODE_INVALID),
    (errors.SlipstreamError, pb.ERROR_CODE_INTERNAL),
)
_KINDS: dict[int, type[SlipstreamError]] = {
    pb.ERROR_CODE_INVALID: errors.InvalidRequestError,
    pb.ERROR_CODE_CONTEXT_LENGTH: errors.ContextLengthError,
    pb.ERROR_CODE_BUSY: errors.BusyError,
    pb.ERROR_CODE_UNAVAILABLE: errors.UnavailableError,
    pb.ERROR_CODE_DEADLINE: errors.DeadlineError,
    pb.ERROR_CODE_CANCELLED: errors.CancelledError,
    pb.ERROR_CODE_LEASE_EXPIRED: errors.LeaseExpiredError,
    pb.ERROR_CODE_INCOMPATIBLE: errors.IncompatibleError,
    pb.ERROR_CODE_PREEMPTED: errors.PreemptedError,
}


def role_to_pb(role: Role) -> pb.Role.ValueType:
    """The wire's name of a role."""
    return _ROLES[role]


def role_from_pb(role: int) -> Role:
    """Raises InternalError for a role that this version does not know."""
    for ours, theirs in _ROLES.items():
        if theirs == role:
            return ours
    raise InternalError(f"a worker says that its role is {role}, which this version does not know; update the older side")


def finish_to_pb(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    """The wire's name of a finish reason; None: the choice goes on."""
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _REASONS[reason]


def finish_from_pb(reason: int) -> FinishReason | None:
    """None for unspecified (the choice goes on) and for a reason of a later version."""
    for ours, theirs in _REASONS.items():
        if theirs == reason:
            return ours
    return None


def sampling_to_pb(sampling: SamplingParams) -> pb.Sampling:
    """The seed is taken modulo 2**64. A top_p that is 0 as float32, which would mean off, becomes one that keeps one token."""
    return pb.Sampling(
        temperature=sampling.temperature, top_p=max(sampling.top_p, LEAST_TOP_P), top_k=sampling.top_k, min_p=sampling.min_p,
        seed=sampling.seed % (1 << 64), presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty, repetition_penalty=sampling.repetition_penalty,
        biased_token=[token for token, _ in sampling.logit_bias], bias=[bias for _, bias in sampling.logit_bias],
        logprobs=sampling.logprobs)


def sampling_from_pb(message: pb.Sampling) -> SamplingParams:
    """A top_p or repetition_penalty of 0 means that the field was not set: off. Raises InvalidRequestError for columns of
    different lengths."""
    if len(message.biased_token) != len(message.bias):
        raise InvalidRequestError(f"logit_bias has {len(message.biased_token)} tokens and {len(message.bias)} biases",
                                  field="logit_bias")
    return SamplingParams(
        temperature=message.temperature, top_p=message.top_p or 1.0, seed=message.seed, top_k=message.top_k,
        min_p=message.min_p, presence_penalty=message.presence_penalty, frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty or 1.0,
        logit_bias=tuple(zip(message.biased_token, message.bias, strict=True)),
        logprobs=message.logprobs if message.HasField("logprobs") else None)


def grammar_to_pb(grammar: Grammar | None) -> pb.Grammar | None:
    """None: the text is free."""
    return None if grammar is None else pb.Grammar(text=grammar.text, think_start=grammar.think_start,
                                                   think_end=grammar.think_end, thinks=grammar.thinks)


def grammar_from_pb(submit: pb.Submit) -> Grammar | None:
    """Of a Submit."""
    if not submit.HasField("grammar"):
        return None
    told = submit.grammar
    return Grammar(text=told.text, think_start=told.think_start if told.HasField("think_start") else None,
                   think_end=told.think_end if told.HasField("think_end") else None, thinks=told.thinks)


def logprobs_to_pb(logprobs: Logprobs, row: int) -> pb.Logprobs:
    """Of the token in `row` of a StepReport's columns."""
    return pb.Logprobs(row=row, logprob=logprobs.logprob, top_token=[token for token, _ in logprobs.top],
                       top_logprob=[logprob for _, logprob in logprobs.top])


def logprobs_from_pb(message: pb.Logprobs) -> Logprobs:
    """Raises ValueError for columns of different lengths."""
    return Logprobs(logprob=message.logprob, top=tuple(zip(message.top_token, message.top_logprob, strict=True)))


def prompt_logprobs_to_pb(told: PromptLogprobs, row: int) -> pb.PromptLogprobs:
    """With the token in `row` of a StepReport's columns."""
    return pb.PromptLogprobs(row=row, logprob=told.logprobs, rank=told.ranks, top_token=told.top_tokens,
                             top_logprob=told.top_logprobs)


def prompt_logprobs_from_pb(message: pb.PromptLogprobs) -> PromptLogprobs:
    """Whether the columns fit together is for the caller to check."""
    return PromptLogprobs(logprobs=tuple(message.logprob), ranks=tuple(message.rank), top_tokens=tuple(message.top_token),
                          top_logprobs=tuple(message.top_logprob))


def stop_to_pb(stop: StopParams, submit: pb.Submit) -> None:
    """Set the stop fields of `submit`."""
    submit.max_tokens = stop.max_tokens
    submit.stop_token_ids[:] = sorted(stop.stop_token_ids)
    submit.ignore_eos = stop.ignore_eos
    submit.min_tokens = stop.min_tokens


def stop_from_pb(submit: pb.Submit) -> StopParams:
    """The stop fields of `submit`."""
    return StopParams(max_tokens=submit.max_tokens, stop_token_ids=frozenset(submit.stop_token_ids),
                      ignore_eos=submit.ignore_eos, min_tokens=submit.min_tokens)


def image_to_pb(content_hash: bytes, grid: Grid) -> pb.Image:
    """An image by the hash of its pixels."""
    return pb.Image(content_hash=content_hash, grid_t=grid.t, grid_h=grid.h, grid_w=grid.w,
                    t_step=grid.t_step if grid.t_step != 1 else 0)


def image_from_pb(image: pb.Image) -> tuple[bytes, Grid]:
    """(content hash, grid). Raises InvalidRequestError for a hash of another size or an empty grid."""
    if len(image.content_hash) != CONTENT_HASH_BYTES:
        raise InvalidRequestError(f"an image's content hash has {len(image.content_hash)} bytes; it must have "
                                  f"{CONTENT_HASH_BYTES}", field="images")
    if not (image.grid_t and image.grid_h and image.grid_w):
        raise InvalidRequestError(f"an image's grid is {image.grid_t} x {image.grid_h} x {image.grid_w}; no side may be 0",
                                  field="images")
    return image.content_hash, Grid(t=image.grid_t, h=image.grid_h, w=image.grid_w, t_step=image.t_step or 1.0)


def load_to_pb(load: EngineLoad, *, draining: bool, tokens_per_second: float = 0.0) -> pb.Load:
    """A replica's load for the wire."""
    return pb.Load(waiting=load.waiting, running=load.running, parked=load.parked, free_blocks=load.free_blocks,
                   free_state_slots=load.free_state_slots, draining=draining, waiting_tokens=load.waiting_tokens,
                   tokens_per_second=tokens_per_second)


def error_code(error: SlipstreamError) -> pb.ErrorCode.ValueType:
    """The wire's code of an exception; what has no row of its own is internal."""
    return next(code for kind, code in _CODES if isinstance(error, kind))


def failed_to_pb(handle: int, attempt: int, error: SlipstreamError) -> pb.Failed:
    """How a worker tells the router that a leg failed. `retry_after_seconds` is rounded up to a millisecond."""
    return pb.Failed(handle=handle, attempt=attempt, code=error_code(error), message=error.message,
                     retry_after_ms=math.ceil(1000 * (error.retry_after_seconds or 0.0)))


def failed_from_pb(failed: pb.Failed) -> SlipstreamError:
    """The exception that a worker reported; an unknown code becomes an InternalError."""
    kind = _KINDS.get(failed.code, InternalError)
    return kind(failed.message, retry_after_seconds=failed.retry_after_ms / 1000 if failed.retry_after_ms else None)
