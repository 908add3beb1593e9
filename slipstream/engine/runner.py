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
    """What became of each chunk: it is in `done`, or its request in `failed`."""

    done: list[tuple[Chunk, tuple[int, ...]]] = field(default_factory=list)
    """With the tokens drawn, one per choice; none for a chunk that does not end its prompt."""
    failed: dict[RequestId, SlipstreamError] = field(default_factory=dict)
    logprobs: dict[tuple[RequestId, int], Logprobs] = field(default_factory=dict)
    """Of the tokens drawn, by request and choice, for the requests that asked."""


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
        draws = [_Draw(chunk, choice, row) for row, chunk in enumerate(chunk for chunk in chunks if chunk.samples)
                 for choice in chunk.sequence.choices]
        try:
            batch = batches.build(chunks, prompts, self._block_size, self._device)
            logits = self._model.forward(batch, self._caches, lambda layer: _publish(layer, chunks, prompts, result))
            assert logits is not None
            self._sample(logits, draws, prompts, result)
        except Exception as error:
            for chunk in chunks:
                result.failed.setdefault(chunk.sequence.id, as_failure("the step failed", chunk.sequence.id, error))
            return result
        drawn: dict[int, list[int]] = {}
        for draw in draws:
            if draw.token is None:
                request = draw.chunk.sequence.id
                result.failed.setdefault(request, InternalError(f"the logits of {request} are not finite"))
            else:
                drawn.setdefault(id(draw.chunk), []).append(draw.token)
        result.done = [(chunk, tuple(drawn.get(id(chunk), ()))) for chunk in chunks if chunk.sequence.id not in result.failed]
        return result

    def _sample(self, logits: torch.Tensor, draws: Sequence[_Draw], prompts: Mapping[RequestId, Prompt],
                result: RunResult) -> None:
        """Draw a token for each choice, from the same row of logits as long as the choices have the same tokens."""
        if not draws:
            return
        if len(draws) > len(logits):
            logits = logits[torch.tensor([draw.row for draw in draws], device=logits.device)]
        wanted = [draw.wanted(prompts[draw.chunk.sequence.id], self._device) for draw in draws]
        tokens = sampler.sample(logits, wanted)
        for draw, token, told in zip(draws, tokens, sampler.logprobs(logits, wanted, tokens), strict=True):
            draw.token = token
            if told is not None:
                result.logprobs[draw.chunk.sequence.id, draw.choice] = told

    def _encode(self, chunk: Chunk, prompt: Prompt) -> None:
        """Embed the images of a prompt when its first image row is reached; those that are cached whole are not needed."""
        first, last = prompt.image_range(chunk.start, chunk.count)
        if first == last or prompt.embeds is not None:
            return
        if not isinstance(self._model, VisionModel):
            raise InternalError("a prompt with image rows reached a model without a vision tower")
        embeds = torch.cat(self._model.encode_images(prompt.pictures_from(chunk.start)))
        wanted = 0 if prompt.image_rows is None else len(prompt.image_rows) - prompt.embeds_from
        if len(embeds) != wanted:
            raise InternalError(f"the vision tower made {len(embeds)} embeddings for {wanted} image rows")
        prompt.embeds = embeds
        prompt.pixels = ()


@dataclass(eq=False)
class _Draw:
    """One token to be drawn."""

    chunk: Chunk
    choice: int
    row: int
    """Of the logits."""
    token: int | None = None

    def wanted(self, prompt: Prompt, device: torch.device) -> sampler.Draw:
        """For the sampler."""
        request, outputs = self.chunk.sequence.request, self.chunk.sequence.outputs
        if request.sampling.repetition_penalty != 1 and prompt.distinct is None:
            prompt.distinct = torch.tensor(sorted(set(request.tokens)), dtype=torch.int64, device=device)
        return sampler.Draw(params=request.sampling, choice=self.choice, index=len(outputs),
                            barred=request.stop.barred(len(outputs)), prompt=prompt.distinct, outputs=outputs)


def _publish(layer: int, chunks: Sequence[Chunk], prompts: Mapping[RequestId, Prompt], result: RunResult) -> None:
    for chunk in chunks:
        publisher = prompts[chunk.sequence.id].publisher
        if publisher is None or chunk.sequence.id in result.failed:
            continue
        try:
            publisher.layer_done(layer, chunk.end, chunk.samples)
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
