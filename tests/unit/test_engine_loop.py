"""The engine thread: calls between steps, no spinning, faults that reach whoever waits."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from functools import partial

import pytest
import torch

from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine, StepResult
from slipstream.engine.loop import EngineLoop
from slipstream.errors import InternalError, InvalidRequestError, UnavailableError
from slipstream.types import RequestId
from tests.support.engine_driver import Collector, Recorder, assert_empty, request
from tests.support.toy_model import ToyModel, answer, toy_checkpoint

LIMIT = 20.0


class CountingEngine(Engine):
    """Counts its steps, and raises an alarm at one more than `allowed`."""

    steps = 0
    allowed = 10**9
    alarm: threading.Event

    def step(self) -> StepResult:
        """See Engine."""
        self.steps += 1
        if self.steps > self.allowed:
            self.alarm.set()
        return super().step()


def make(parked_fraction: float = 1.0) -> tuple[CountingEngine, ToyModel]:
    checkpoint = toy_checkpoint()
    model = ToyModel(checkpoint)
    config = EngineConfig(block_size=4, kv_cache_tokens=160, max_running=8, max_batch_tokens=64)
    engine = CountingEngine(model, checkpoint, config, parked_fraction=parked_fraction)
    engine.alarm = threading.Event()
    return engine, model


class Finish:
    """Collects steps and sets an event when `count` requests are finished."""

    def __init__(self, count: int) -> None:
        self.collector = Collector()
        self.count = count
        self.all = threading.Event()

    def __call__(self, result: StepResult) -> None:
        self.collector.add(result)
        if len(self.collector.finish) >= self.count:
            self.all.set()


def expected(tokens: list[int], count: int) -> list[int]:
    return answer(tokens, [[i] * 3 for i in range(len(tokens))], 0, count)


def test_requests_from_many_threads_are_answered() -> None:
    engine, _ = make()
    finish = Finish(12)
    loop = EngineLoop(engine, finish)
    loop.start()
    prompts = {f"r{i}": [i, i + 1, i + 2] for i in range(12)}
    threads = [threading.Thread(target=loop.call, args=(lambda e, n=name, t=tokens: e.submit(request(n, t, 4)),))
               for name, tokens in prompts.items()]
    for thread in threads:
        thread.start()
    assert finish.all.wait(LIMIT)
    assert finish.collector.tokens == {name: expected(tokens, 4) for name, tokens in prompts.items()}
    loop.stop()
    assert not loop.is_alive()
    assert_empty(engine)


def test_a_call_returns_its_result_or_its_exception() -> None:
    engine, _ = make()
    loop = EngineLoop(engine, lambda result: None)
    loop.start()
    assert loop.call(lambda e: e.load().total_blocks).result(LIMIT) == 40
    assert loop.call(lambda e: threading.current_thread() is loop).result(LIMIT)
    assert loop.call(lambda e: torch.is_inference_mode_enabled()).result(LIMIT)
    with pytest.raises(InvalidRequestError, match="empty"):
        loop.call(lambda e: e.submit(request("r", []))).result(LIMIT)
    assert loop.call(lambda e: 5).result(LIMIT) == 5
    loop.stop()


def test_an_idle_or_stalled_loop_does_not_step() -> None:
    engine, _ = make(parked_fraction=0.1)
    handed_off = threading.Event()
    finish = Finish(2)
    loop = EngineLoop(engine, lambda result: (finish(result), handed_off.set()))  # type: ignore[arg-type, func-returns-value]
    loop.start()
    loop.call(lambda e: None).result(LIMIT)
    assert engine.steps == 0
    loop.call(lambda e: e.submit(request("first", [1] * 20, 2), (), Recorder())).result(LIMIT)
    assert handed_off.wait(LIMIT)
    loop.call(lambda e: e.submit(request("second", [2] * 20, 1), (), Recorder())).result(LIMIT)
    # A call wakes the loop for one step. That one finds nothing to run, and no other follows by itself: a loop that spins
    # makes thousands in the time that we watch.
    engine.allowed = loop.call(lambda e: engine.steps).result(LIMIT) + 1
    assert not engine.alarm.wait(0.2)
    assert loop.call(lambda e: e.has_work).result(LIMIT)
    finish.count = 1
    loop.call(lambda e: e.release(RequestId(name="first"))).result(LIMIT)
    assert finish.all.wait(LIMIT)
    assert set(finish.collector.finish) == {"second"}
    loop.stop()


def _second(number: int, engine: Engine) -> int:
    return number


def test_stop_runs_the_calls_made_before_and_refuses_those_after() -> None:
    engine, _ = make()
    loop = EngineLoop(engine, lambda result: None)
    before = [loop.call(partial(_second, i)) for i in range(5)]
    loop.start()
    loop.stop()
    assert [future.result(0) for future in before] == list(range(5))
    with pytest.raises(UnavailableError, match="stopped"):
        loop.call(lambda e: 1).result(0)


def test_a_loop_that_never_started_refuses_after_stop() -> None:
    engine, _ = make()
    loop = EngineLoop(engine, lambda result: None)
    loop.stop()
    with pytest.raises(UnavailableError):
        loop.call(lambda e: 1).result(0)


def test_stop_from_the_engine_thread_does_not_deadlock() -> None:
    engine, _ = make()
    loop = EngineLoop(engine, lambda result: None)
    loop.start()
    loop.call(lambda e: loop.stop()).result(LIMIT)
    loop.join(LIMIT)
    assert not loop.is_alive()


def test_a_fault_of_the_loop_itself_reaches_everyone_who_waits() -> None:
    engine, _ = make()
    deaths: list[BaseException] = []
    release = threading.Event()

    def broken(result: StepResult) -> None:
        release.wait(LIMIT)
        raise RuntimeError("the report failed")

    loop = EngineLoop(engine, broken, deaths.append)
    loop.start()
    loop.call(lambda e: e.submit(request("r", [1, 2], 1))).result(LIMIT)
    waiting = [loop.call(lambda e: None) for _ in range(3)]
    release.set()
    wait(waiting, LIMIT)
    for future in [*waiting, loop.call(lambda e: None)]:
        with pytest.raises(InternalError, match="the report failed"):
            future.result(LIMIT)
    loop.join(LIMIT)
    assert [str(error) for error in deaths] == ["the report failed"]


def test_a_cancelled_call_does_not_run() -> None:
    engine, _ = make()
    loop = EngineLoop(engine, lambda result: None)
    ran: list[int] = []
    cancelled = loop.call(lambda e: ran.append(1))
    assert cancelled.cancel()
    loop.start()
    loop.call(lambda e: None).result(LIMIT)
    loop.stop()
    assert ran == []
