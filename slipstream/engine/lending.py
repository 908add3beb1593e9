"""Sequences that compute nothing: what is cached of a prompt, on its way from one replica's cache to another's. Pure."""

from __future__ import annotations

from dataclasses import replace

from slipstream.checkpoint import Checkpoint
from slipstream.engine.prompt import block_keys
from slipstream.engine.sequence import GenerationRequest, Sequence
from slipstream.errors import ProtocolError


def lent(request: GenerationRequest, checkpoint: Checkpoint, block_size: int) -> Sequence:
    """For the side that has it."""
    return Sequence(request=request, split=True, max_outputs=1, keys=block_keys(request, checkpoint, block_size))


def borrowed(request: GenerationRequest, num_tokens: int, checkpoint: Checkpoint, block_size: int) -> Sequence:
    """For the side that gets the first `num_tokens`. Its keys are those of the whole prompt, pictures included. Raises
    ProtocolError if these are no whole blocks of it, or have no keys."""
    keys, tokens = block_keys(request, checkpoint, block_size), request.tokens + request.output
    if keys is None or num_tokens % block_size or not 0 < num_tokens <= len(tokens):
        raise ProtocolError(f"{num_tokens} cached tokens are offered of a prompt of {len(tokens)}, in blocks of {block_size}")
    begin = replace(request, tokens=tokens[:num_tokens], output=(), grids=(), images=(), choices=(0,))
    return Sequence(request=begin, split=True, max_outputs=1, keys=keys[: num_tokens // block_size])
