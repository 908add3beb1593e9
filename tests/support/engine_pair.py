"""A prefill and a decode engine with the router between them: hands over, resumes what is preempted or cut off. No process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from slipstream.engine.engine import Engine, GenerationRequest, StepResult
from slipstream.engine.prompt import Pixels
from slipstream.errors import PreemptedError
from slipstream.types import RequestId
from tests.support.engine_driver import Recorder, copy_state


class Pair:
    """Without a decode engine nothing is handed over: the one engine decodes what it computes."""

    def __init__(self, prefill: Engine, decode: Engine | None) -> None:
        self.prefill, self.decode = prefill, decode
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.open: set[tuple[str, int]] = set()
        self.recorders: dict[RequestId, Recorder] = {}
        self.requests: dict[RequestId, tuple[GenerationRequest, Sequence[Pixels]]] = {}
        self.waiting: list[RequestId] = []
        self.resumes = 0

    def submit(self, asked: GenerationRequest, pixels: Sequence[Pixels]) -> None:
        self.requests[asked.id] = asked, pixels
        for choice in asked.choices:
            self.tokens.setdefault((asked.id.name, choice), [])
            self.open.add((asked.id.name, choice))
        if self.decode is None:
            self.prefill.submit(asked, pixels)
            return
        self.recorders[asked.id] = Recorder()
        self.prefill.submit(asked, pixels, self.recorders[asked.id])
        self.prefill.mark_ready(asked.id)

    def take(self, result: StepResult) -> None:
        for event in result.events:
            tokens = self.tokens[event.request.name, event.choice]
            assert event.index == len(tokens), "no gap and no repetition"
            tokens.append(event.token)
            if event.finish is not None:
                self.open.remove((event.request.name, event.choice))
        for id, error in result.failures:
            assert isinstance(error, PreemptedError)
            self.resume(id)

    def resume(self, id: RequestId) -> None:
        """As the router does: each choice that is open goes on from its own tokens."""
        self.resumes += 1
        asked, pixels = self.requests.pop(id)
        for choice in asked.choices:
            if (id.name, choice) in self.open:
                again = RequestId(name=id.name, attempt=id.attempt + 100 * choice + 1000)
                output = tuple(self.tokens[id.name, choice])
                self.submit(dataclasses.replace(asked, id=again, choices=(choice,), output=output), pixels)

    def hand_over(self, decode: Engine) -> None:
        for id in list(self.waiting):
            asked, _ = self.requests[id]
            first = {choice: self.tokens[id.name, choice][-1] for choice in asked.choices}
            if any((id.name, choice) in self.open for choice in asked.choices):
                landing = decode.reserve(asked)
                if landing is None:
                    continue
                rows = len(asked.tokens) + len(asked.output)
                copy_state(self.prefill, *self.recorders[id].place, decode, landing, rows)
                decode.commit(id, first_tokens=list(first.values()), mrope=self.prefill.mrope(id))
            self.prefill.release(id)
            self.waiting.remove(id)

    def step(self) -> None:
        result = self.prefill.step()
        self.take(result)
        self.prefill.check_integrity()
        if self.decode is not None:
            self.waiting += result.handed_off
            self.hand_over(self.decode)
            self.take(self.decode.step())
            self.decode.check_integrity()

    def engines(self) -> list[Engine]:
        return [self.prefill] if self.decode is None else [self.prefill, self.decode]

    def run(self, steps: int = 10_000) -> None:
        for _ in range(steps):
            if not self.open:
                return
            self.step()
        assert steps < 10_000, f"never ended: {self.open}"


