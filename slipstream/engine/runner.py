"""Runs one step's chunks through the model: images, forward pass, publishing, sampling. Knows no schedule and no pool."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from slipstream.engine import batch as batches
from slipstream.engine import sampler
from slipstream.engine.prompt import Prompt
from slipstream.engine.scheduler import Chunk
from slipstream.errors import InternalError, SlipstreamError
from slipstream.layers.batch import LayerCache
from slipstream.models.registry import LanguageModel, VisionModel
from slipstream.types import Logprobs, RequestId

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RunResult:
    """What became of each chunk: it is in exactly one of `done` and `failed`."""

    done: list[tuple[Chunk, int | None]] = field(default_factory=list)
    """With the token drawn; None for a chunk that does not end its prompt."""
    failed: dict[RequestId, SlipstreamError] = field(default_factory=dict)
    logprobs: dict[RequestId, Logprobs] = field(default_factory=dict)
    """Of the tokens drawn, for the requests that asked."""


class Runner:
    """The model, its caches and the way through them."""

    def __init__(self, model: LanguageModel, caches: Sequence[LayerCache], block_size: int, device: torch.device) -> None:
        self._model = model
        self._caches = caches
        self._block_size = block_size
        self._device = device

    def run(self, chunks: Sequence[Chunk], prompts: Mapping[RequestId, Prompt]) -> RunResult:
        """Compute the chunks. A fault of one request's own (its images, its publisher, its logits) fails that request;
        a fault of the forward pass fails them all."""
        result = RunResult()
        for chunk in chunks:
            try:
                self._encode(chunk, prompts[chunk.sequence.id])
            except Exception as error:
                result.failed[chunk.sequence.id] = as_failure("encoding the images failed", chunk.sequence.id, error)
        chunks = [chunk for chunk in chunks if chunk.sequence.id not in result.failed]
        if not chunks:
            return result
        sampling = [chunk for chunk in chunks if chunk.samples]
        try:
            batch = batches.build(chunks, prompts, self._block_size, self._device)
            logits = self._model.forward(batch, self._caches, lambda layer: _publish(layer, chunks, prompts, result))
            draws = [_draw(chunk, prompts[chunk.sequence.id], self._device) for chunk in sampling]
            drawn = sampler.sample(logits, draws) if sampling else []
            told = sampler.logprobs(logits, draws, drawn) if sampling else []
        except Exception as error:
            for chunk in chunks:
                result.failed.setdefault(chunk.sequence.id, as_failure("the step failed", chunk.sequence.id, error))
            return result
        tokens = dict(zip((chunk.sequence.id for chunk in sampling), drawn, strict=True))
        result.logprobs = {chunk.sequence.id: one for chunk, one in zip(sampling, told, strict=True) if one is not None}
        for chunk in chunks:
            token = tokens.get(chunk.sequence.id)
            if chunk.samples and token is None:
                result.failed.setdefault(chunk.sequence.id, InternalError(f"the logits of {chunk.sequence.id} are not finite"))
            if chunk.sequence.id not in result.failed:
                result.done.append((chunk, token))
        return result

    def _encode(self, chunk: Chunk, prompt: Prompt) -> None:
        """Embed all images of a prompt when its first image row is reached."""
        first, last = prompt.image_range(chunk.start, chunk.count)
        if first == last or prompt.embeds is not None:
            return
        if not isinstance(self._model, VisionModel):
            raise InternalError("a prompt with image rows reached a model without a vision tower")
        embeds = torch.cat(self._model.encode_images(prompt.pixels))
        if prompt.image_rows is None or len(embeds) != len(prompt.image_rows):
            raise InternalError(f"the vision tower made {len(embeds)} embeddings for {prompt.image_rows} image rows")
        prompt.embeds = embeds
        prompt.pixels = ()


def _draw(chunk: Chunk, prompt: Prompt, device: torch.device) -> sampler.Draw:
    """The next token of the chunk's sequence."""
    request, outputs = chunk.sequence.request, chunk.sequence.outputs
    if request.sampling.repetition_penalty != 1 and prompt.distinct is None:
        prompt.distinct = torch.tensor(sorted(set(request.tokens)), dtype=torch.int64, device=device)
    return sampler.Draw(params=request.sampling, choice=0, index=len(outputs), barred=request.stop.barred(len(outputs)),
                        prompt=prompt.distinct, outputs=outputs)


def _publish(layer: int, chunks: Sequence[Chunk], prompts: Mapping[RequestId, Prompt], result: RunResult) -> None:
    for chunk in chunks:
        publisher = prompts[chunk.sequence.id].publisher
        if publisher is None or chunk.sequence.id in result.failed:
            continue
        try:
            publisher.layer_done(layer, chunk.start + chunk.count, chunk.samples)
        except Exception as error:
            result.failed[chunk.sequence.id] = as_failure("publishing the prompt's state failed", chunk.sequence.id, error)


def as_failure(what: str, request: RequestId, error: Exception) -> SlipstreamError:
    """`error` as the tree's; one that is foreign is logged with its traceback and becomes an InternalError."""
    if isinstance(error, SlipstreamError):
        logger.warning("%s: %s", what, error.message, extra={"request_id": str(request)})
        return error
    logger.error(what, exc_info=error, extra={"request_id": str(request)})
    failure = InternalError(f"{what}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
