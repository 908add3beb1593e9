"""Runs one step's chunks: images, what is computed, publishing, tokens. Knows no schedule, no pool and no other rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from slipstream.engine import batch as batches
from slipstream.engine import sampler
from slipstream.engine.budget import Chunk
from slipstream.engine.executor import Computed, Draw, Executor, Published, Result
from slipstream.engine.prompt import Prompt
from slipstream.engine.scoring import Scores
from slipstream.errors import GangError, InternalError, SlipstreamError
from slipstream.models.registry import LanguageModel, VisionModel
from slipstream.types import Logprobs, RequestId

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RunResult:
    """What became of each chunk: it is in `done`, or its request in `failed`."""

    chunks: Sequence[Chunk] = ()
    """All of them."""
    done: list[tuple[Chunk, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """With the tokens drawn: one per choice, or of the one choice its right drafts and one; none for a chunk that does not end
    its prompt; and the drafts of tokens to come."""
    failed: dict[RequestId, SlipstreamError] = field(default_factory=dict)
    logprobs: dict[tuple[RequestId, int, int], Logprobs] = field(default_factory=dict)
    """Of the tokens drawn, by request, choice and index, for the requests that asked."""
    scores: dict[RequestId, Scores] = field(default_factory=dict)
    """Of tokens of prompts, for the requests that asked."""


class Runner:
    """The way of chunks through an executor. `model` encodes pictures."""

    def __init__(self, model: LanguageModel, executor: Executor, block_size: int, device: torch.device) -> None:
        self._model = model
        self._executor = executor
        self._block_size = block_size
        self._device = device

    @property
    def depth(self) -> int:
        """Runs that are worth having begun at once."""
        return self._executor.depth

    def start(self, chunks: Sequence[Chunk], prompts: Mapping[RequestId, Prompt]) -> Run:
        """Begin to compute the chunks. A fault of one request's own (its images, its publisher, its logits) fails that request;
        a fault of the forward pass fails them all."""
        run = Run(chunks)
        failed = run.result.failed
        allowed: dict[tuple[int, int], bytes] = {}
        for chunk in chunks:
            try:
                self._encode(chunk, prompts[chunk.sequence.id])
                if chunk.samples and chunk.sequence.matcher is not None:
                    masks = chunk.sequence.matcher.allowed_along(chunk.drafts)
                    allowed |= {(id(chunk), more): mask for more, mask in enumerate(masks)}
            except Exception as error:
                failed[chunk.sequence.id] = as_failure("preparing the step failed", chunk.sequence.id, error)
        run.going = [chunk for chunk in chunks if chunk.sequence.id not in failed]
        if not run.going:
            return run
        publishers = [(chunk, prompts[chunk.sequence.id].publisher) for chunk in run.going]

        def publish(layer: int) -> None:
            for chunk, publisher in publishers:
                if publisher is None or chunk.sequence.id in failed:
                    continue
                try:
                    publisher.layer_done(layer, chunk.end, chunk.samples)
                except Exception as error:
                    failed[chunk.sequence.id] = as_failure("publishing the prompt's state failed", chunk.sequence.id, error)

        try:
            step, embeds = batches.build(run.going, prompts, self._block_size)
            rows = [(chunk, more) for chunk in run.going for more in range(chunk.sampled)]
            run.draws = [(chunk, choice, more) for chunk, more in rows for choice in chunk.sequence.choices]
            draws = [Draw(row=row, how=self._how(chunk, choice, more, prompts[chunk.sequence.id],
                                                  allowed.get((id(chunk), more))))
                     for row, (chunk, more) in enumerate(rows) for choice in chunk.sequence.choices]
            published = [Published(request=chunk.sequence.id, tokens=chunk.end, last=chunk.samples)
                         for chunk, publisher in publishers if publisher is not None]
            run.wait = self._executor.start(step, embeds, draws, published, publish)
        except GangError:
            raise  # the ranks may not agree any more
        except Exception as error:
            run.fail(error)
        return run

    def _how(self, chunk: Chunk, choice: int, more: int, prompt: Prompt, allowed: bytes | None) -> sampler.Draw:
        """`more`: drafts of the chunk that are output already, if this draw counts."""
        request, outputs = chunk.sequence.request, chunk.sequence.outputs
        outputs = [*outputs, *chunk.drafts[:more]] if more else outputs
        if request.sampling.repetition_penalty != 1 and prompt.distinct is None:
            prompt.distinct = torch.tensor(sorted(set(request.tokens)), dtype=torch.int64, device=self._device)
        return sampler.Draw(params=request.sampling, choice=choice, index=len(outputs),
                            barred=request.stop.barred(len(outputs)), prompt=prompt.distinct, outputs=outputs, allowed=allowed)

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


class Run:
    """A step that has begun."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.result = RunResult(chunks=chunks)
        self.going: Sequence[Chunk] = ()
        """Those that are computed."""
        self.draws: list[tuple[Chunk, int, int]] = []
        """Chunk and choice of each token, and the drafts that must be right for it to count."""
        self.wait: Result | None = None
        """None: nothing is computed."""

    def finish(self) -> RunResult:
        """Wait for its end."""
        computed = Computed()
        if self.wait is not None:
            try:
                computed = self.wait()
            except GangError:
                raise
            except Exception as error:
                self.fail(error)
        result, tokens, drafts = self.result, dict[int, list[int]](), dict[int, tuple[int, ...]]()
        if computed.scores is not None:
            self._score(computed.scores)
        for (chunk, choice, more), one in zip(self.draws if computed.drawn else [], computed.drawn, strict=True):
            request = chunk.sequence.id
            if more and tokens.get(id(chunk)) != [*chunk.drafts[:more]]:
                continue
            if one.token is None:
                self._unsound(request)
                continue
            tokens.setdefault(id(chunk), []).append(one.token)
            drafts[id(chunk)] = one.drafts
            if one.logprobs is not None:
                result.logprobs[request, choice, len(chunk.sequence.outputs) + more] = one.logprobs
        result.done = [(chunk, tuple(tokens.get(id(chunk), ())), drafts.get(id(chunk), ())) for chunk in self.going
                       if chunk.sequence.id not in result.failed]
        return result

    def _score(self, scores: Scores) -> None:
        first = 0
        for chunk in self.going:
            if count := chunk.scored:
                part = scores.part(first, first + count, chunk.sequence.request.prompt_logprobs or 0)
                self.result.scores[chunk.sequence.id] = part
                first += count
                if not part.sound:
                    self._unsound(chunk.sequence.id)

    def _unsound(self, request: RequestId) -> None:
        self.result.failed.setdefault(request, InternalError(f"the logits of {request} are not finite"))

    def fail(self, error: Exception) -> None:
        """Nothing of it counts."""
        for chunk in self.going:
            self.result.failed.setdefault(chunk.sequence.id, as_failure("the step failed", chunk.sequence.id, error))


def as_failure(what: str, request: RequestId, error: Exception) -> SlipstreamError:
    """`error` as the tree's; one that is foreign is logged with its traceback and becomes an InternalError."""
    if isinstance(error, SlipstreamError):
        logger.warning("%s: %s", what, error.message, extra={"request_id": str(request)})
        return error
    logger.error(what, exc_info=error, extra={"request_id": str(request)})
    failure = InternalError(f"{what}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
