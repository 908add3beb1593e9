"""worker.jobs and worker.session: one end per leg, cancel in every state, deadlines, drain, one report per step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from slipstream.engine.sequence import Timing
from slipstream.errors import InternalError, InvalidRequestError, SlipstreamError
from slipstream.types import EngineLoad, FinishReason, RequestId, Role, TokenEvent
from slipstream.v1 import worker_pb2 as pb
from worker.jobs import Job, Jobs, PromptDone
from worker.replica import Replica
from worker.service import Identity, WorkerService
from worker.session import REMEMBERED, Session


class ScriptedRole:
    """Does what a test tells it: each job waits for `go`, then acts by its request id."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.cleaned: list[tuple[str, SlipstreamError | None]] = []
        self.cleaned_one = asyncio.Event()
        self.fence = asyncio.Event()
        self.fence.set()

    async def work(self, job: Job) -> None:
        await self.go.wait()
        match job.request.id.name:
            case "wrong":
                raise InvalidRequestError("no good")
            case "fault":
                raise ZeroDivisionError
            case "nothing":
                return
            case "tokens":
                await job.ended
            case _:
                job.finish(handed_off=False)

    async def clean_up(self, job: Job, error: SlipstreamError | None) -> None:
        await self.fence.wait()
        self.cleaned.append((job.request.id.name, error))
        self.cleaned_one.set()
        if job.request.id.name == "dirty":
            raise ZeroDivisionError

    def on_tokens(self, job: Job, events: Sequence[TokenEvent], timing: Timing | None, prompt: PromptDone | None) -> None:
        for event in events:
            assert event.token != 13
            job.token(event)
            if event.finish is not None:
                job.finish(handed_off=False)
                job.ended.set_result(None)


def submit(handle: int, name: str = "", attempt: int = 0, remaining_ms: int = 60_000, **more: object) -> pb.RouterMessage:
    return pb.RouterMessage(submit=pb.Submit(handle=handle, request_id=name or f"r{handle}", transfer_id=f"t{handle}",
                                             attempt=attempt, tokens=[1], max_tokens=4, remaining_ms=remaining_ms,
                                             **more))  # type: ignore[arg-type]


def cancel(handle: int, attempt: int = 0) -> pb.RouterMessage:
    return pb.RouterMessage(cancel=pb.Cancel(handle=handle, attempt=attempt))


async def next_of(session: Session) -> pb.WorkerMessage:
    message = await asyncio.wait_for(session.next_message(), 5)
    assert message is not None
    return message


class Rig:
    def __init__(self) -> None:
        self.role = ScriptedRole()
        self.jobs = Jobs(self.role)
        self.session = Session(Role.PREFILL, self.jobs, lambda: pb.Load(free_blocks=7))

    async def report(self) -> pb.StepReport:
        message = await next_of(self.session)
        assert message.WhichOneof("message") == "step"
        return message.step

    async def failure(self) -> pb.Failed:
        report = await self.report()
        assert len(report.failed) == 1
        assert not report.finished
        return report.failed[0]

    async def all_gone(self) -> None:
        async with asyncio.timeout(5):
            await self.jobs.idle.wait()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    rig.session.close()
    rig.role.fence.set()
    await rig.all_gone()


class Tally:
    """An Observer that keeps the outcomes."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def landed(self, stats: pb.LegStats) -> None:
        raise AssertionError("no transfer comes here")

    def ended(self, outcome: str, stats: pb.LegStats) -> None:
        self.outcomes.append(outcome)


async def test_every_leg_is_counted_once_by_how_it_ended(rig: Rig) -> None:
    tally = rig.jobs.observer = Tally()
    for handle, name in enumerate(("fine", "wrong", "fault", "left", "fine", "dirty")):  # the second `fine` runs already
        rig.session.receive(submit(handle, name))
    rig.session.receive(submit(9, "late", remaining_ms=0))
    rig.session.receive(cancel(3))
    rig.session.receive(cancel(3))
    async with asyncio.timeout(5):
        while len(rig.role.cleaned) < 2:  # noqa: ASYNC110 (the two that need no `go`)
            await asyncio.sleep(0)
    rig.role.go.set()
    await rig.all_gone()
    assert sorted(tally.outcomes) == ["cancelled", "deadline_exceeded", "internal", "invalid_request", "invalid_request", "ok",
                                      "ok"]
    rig.jobs.draining = True
    rig.session.receive(submit(10))
    assert tally.outcomes[-1] == "unavailable"


async def test_a_job_ends_once(rig: Rig) -> None:
    rig.role.go.set()
    rig.session.receive(submit(1))
    report = await rig.report()
    assert [end.handle for end in report.finished] == [1]
    assert report.load.free_blocks == 7
    await rig.all_gone()
    rig.session.receive(cancel(1))  # too late: it has had its end
    rig.session.want_load()
    assert (await next_of(rig.session)).WhichOneof("message") == "load"
    assert rig.role.cleaned == [("r1", None)]


@pytest.mark.parametrize(("name", "code"), [("wrong", pb.ERROR_CODE_INVALID), ("fault", pb.ERROR_CODE_INTERNAL),
                                            ("nothing", pb.ERROR_CODE_INTERNAL)])
async def test_whatever_goes_wrong_fails_one_request(rig: Rig, name: str, code: int) -> None:
    rig.role.go.set()
    rig.session.receive(submit(1, name))
    assert (await rig.failure()).code == code
    rig.session.receive(submit(2))
    assert (await rig.report()).finished[0].handle == 2


async def test_a_fault_while_cleaning_up_ends_the_job_all_the_same(rig: Rig) -> None:
    rig.role.go.set()
    rig.session.receive(submit(1, "dirty"))
    assert (await rig.report()).finished
    await rig.all_gone()


async def test_cancel_is_acknowledged_before_the_memory_is_back(rig: Rig) -> None:
    rig.role.fence.clear()
    rig.session.receive(submit(1))
    await asyncio.sleep(0)
    rig.session.receive(cancel(1))
    assert (await rig.failure()).code == pb.ERROR_CODE_CANCELLED
    assert not rig.role.cleaned
    assert len(rig.jobs) == 1
    rig.session.receive(cancel(1))  # again: nothing more is said
    rig.role.fence.set()
    await rig.all_gone()
    assert [name for name, _ in rig.role.cleaned] == ["r1"]


async def test_cancel_in_the_same_moment_as_submit(rig: Rig) -> None:
    rig.session.receive(submit(1))
    rig.session.receive(cancel(1))
    assert (await rig.failure()).code == pb.ERROR_CODE_CANCELLED
    await rig.all_gone()


async def test_cancel_before_submit_leaves_a_tombstone(rig: Rig) -> None:
    rig.role.go.set()
    rig.session.receive(cancel(5, attempt=2))
    assert (await rig.failure()).code == pb.ERROR_CODE_CANCELLED
    rig.session.receive(submit(5, attempt=2))
    assert (await rig.failure()).code == pb.ERROR_CODE_CANCELLED
    rig.session.receive(submit(5, attempt=3))
    assert (await rig.report()).finished[0].attempt == 3
    assert rig.jobs.started == 1


async def test_tombstones_are_bounded(rig: Rig) -> None:
    for handle in range(REMEMBERED + 100):
        rig.session.receive(cancel(handle))
    assert len(rig.session._past) == REMEMBERED


async def test_a_handle_and_attempt_is_used_once(rig: Rig) -> None:
    rig.session.receive(submit(1))
    rig.session.receive(submit(1))
    assert "runs already" in (await rig.failure()).message
    rig.role.go.set()
    assert (await rig.report()).finished[0].handle == 1, "the first one goes on"
    await rig.all_gone()
    rig.session.receive(submit(1))
    assert "used before" in (await rig.failure()).message


async def test_a_request_id_and_attempt_runs_once_over_all_sessions(rig: Rig) -> None:
    other = Session(Role.PREFILL, rig.jobs, pb.Load)
    rig.session.receive(submit(1, "same"))
    other.receive(submit(9, "same"))
    assert "runs here already" in (await next_of(other)).step.failed[0].message
    other.receive(submit(9, "same", attempt=1))
    rig.role.go.set()
    assert (await next_of(other)).step.finished[0].handle == 9


async def test_the_deadline_is_the_workers_business(rig: Rig) -> None:
    rig.session.receive(submit(1, remaining_ms=20))
    assert (await rig.failure()).code == pb.ERROR_CODE_DEADLINE
    await rig.all_gone()
    assert rig.role.cleaned[0][0] == "r1"
    await asyncio.wait_for(rig.role.cleaned_one.wait(), 5)
    assert [getattr(error, "code", None) for _, error in rig.role.cleaned] == ["deadline_exceeded"], "a peer is told the reason"


@pytest.mark.parametrize(("content_hash", "height", "field"), [(b"short", 2, "hash"), (bytes(16), 0, "grid")])
async def test_a_malformed_submit_fails_itself(rig: Rig, content_hash: bytes, height: int, field: str) -> None:
    rig.session.receive(submit(1, images=[pb.Image(content_hash=content_hash, grid_t=1, grid_h=height, grid_w=2)]))
    failed = await rig.failure()
    assert failed.code == pb.ERROR_CODE_INVALID
    assert field in failed.message


async def test_a_refused_submit_has_had_its_end(rig: Rig) -> None:
    rig.session.receive(submit(1, images=[pb.Image(content_hash=b"short", grid_t=1, grid_h=2, grid_w=2)]))
    assert (await rig.failure()).code == pb.ERROR_CODE_INVALID
    rig.session.receive(cancel(1))  # crossed the refusal on the wire
    rig.session.want_load()
    assert (await next_of(rig.session)).WhichOneof("message") == "load"


async def test_decode_needs_an_address_and_pictures_need_their_hashes(rig: Rig) -> None:
    session = Session(Role.DECODE, rig.jobs, pb.Load)
    session.receive(submit(1))
    assert "prefill_addresses" in (await next_of(session)).step.failed[0].message
    image = pb.Image(content_hash=bytes(15), grid_t=1, grid_h=2, grid_w=2)
    session.receive(submit(2, prefill_addresses=["a:1"], images=[image]))
    assert "has 15 bytes" in (await next_of(session)).step.failed[0].message


def event(name: str, index: int, token: int = 5, finish: FinishReason | None = None
          ) -> tuple[tuple[TokenEvent, ...], Timing | None, PromptDone | None]:
    return (TokenEvent(request=RequestId(name=name), choice=0, index=index, token=token, finish=finish),), None, None


async def test_a_step_is_one_report_per_session(rig: Rig) -> None:
    rig.role.go.set()
    other = Session(Role.PREFILL, rig.jobs, pb.Load)
    rig.session.receive(submit(1, "tokens"))
    rig.session.receive(submit(2, "tokens", attempt=1))
    other.receive(submit(1, "elsewhere"))
    two = (tuple(TokenEvent(request=RequestId(name="tokens", attempt=1), choice=choice, index=4, token=8 + choice)
                 for choice in (0, 2)), None, None)
    rig.jobs.on_step([event("tokens", 3, 7), two, event("gone", 0)], [])
    report = await rig.report()
    assert list(zip(report.handle, report.attempt, report.choice, report.index, report.token, strict=True)) == [
        (1, 0, 0, 3, 7), (2, 1, 0, 4, 8), (2, 1, 2, 4, 10)]
    rig.jobs.on_step([event("tokens", 4, 9, FinishReason.LENGTH)], [])
    report = await rig.report()
    assert (list(report.token), list(report.finish)) == ([9], [pb.FINISH_REASON_LENGTH]), "the end comes with its token"
    assert report.finished[0].handle == 1


async def test_no_token_after_the_end(rig: Rig) -> None:
    rig.role.go.set()
    rig.role.fence.clear()
    rig.session.receive(submit(1, "tokens"))
    rig.session.receive(cancel(1))
    rig.jobs.on_step([event("tokens", 0)], [])
    report = await rig.report()
    assert (list(report.token), [end.code for end in report.failed]) == ([], [pb.ERROR_CODE_CANCELLED])


async def test_a_fault_in_one_token_spares_the_others_of_the_step(rig: Rig) -> None:
    rig.role.go.set()
    rig.session.receive(submit(1, "tokens"))
    rig.session.receive(submit(2, "tokens", attempt=1))
    two = ((TokenEvent(request=RequestId(name="tokens", attempt=1), choice=0, index=0, token=8),), None, None)
    rig.jobs.on_step([event("tokens", 0, token=13), two], [])
    report = await rig.report()
    assert (list(report.token), report.failed[0].handle, report.failed[0].code) == ([8], 1, pb.ERROR_CODE_INTERNAL)


async def test_what_the_engine_fails_the_router_hears(rig: Rig) -> None:
    rig.role.go.set()
    rig.session.receive(submit(1, "tokens"))
    failures = {"tokens": InternalError("out of luck"), "gone": InternalError("nobody asked")}
    rig.jobs.on_step([], [(RequestId(name=name), error) for name, error in failures.items()])
    failed = await rig.failure()
    assert (failed.code, failed.message) == (pb.ERROR_CODE_INTERNAL, "out of luck")


async def test_a_closed_session_gives_up_its_requests_only(rig: Rig) -> None:
    other = Session(Role.PREFILL, rig.jobs, pb.Load)
    rig.session.receive(submit(1))
    other.receive(submit(1, "stays"))
    rig.session.close()
    await asyncio.wait_for(rig.role.cleaned_one.wait(), 5)
    assert [name for name, _ in rig.role.cleaned] == ["r1"]
    rig.role.go.set()
    assert (await next_of(other)).step.finished[0].handle == 1


async def test_an_ending_session_says_everything_first(rig: Rig) -> None:
    rig.role.go.set()
    rig.session.receive(submit(1))
    await rig.all_gone()
    rig.session.end()
    assert (await rig.report()).finished[0].handle == 1
    assert await asyncio.wait_for(rig.session.next_message(), 5) is None


async def test_drain_refuses_new_requests_and_waits_for_the_old(rig: Rig) -> None:
    rig.session.receive(submit(1))
    draining = asyncio.create_task(rig.jobs.drain(5))
    await asyncio.sleep(0)
    rig.session.receive(submit(2))
    assert (await rig.failure()).code == pb.ERROR_CODE_UNAVAILABLE
    assert not draining.done()
    rig.role.go.set()
    assert await draining == 0
    assert (await rig.report()).finished[0].handle == 1


async def test_drain_cuts_off_what_takes_too_long(rig: Rig) -> None:
    rig.session.receive(submit(1))
    assert await rig.jobs.drain(0.01) == 1
    assert (await rig.failure()).code == pb.ERROR_CODE_UNAVAILABLE
    assert len(rig.jobs) == 0


async def test_a_dead_engine_ends_everything(rig: Rig) -> None:
    load = EngineLoad(waiting=0, running=0, parked=0, free_blocks=1, total_blocks=1, free_state_slots=0, total_state_slots=0)
    replica = cast(Replica, SimpleNamespace(capacity=load))
    service = WorkerService(Identity(replica_id="x", epoch=1, role=Role.PREFILL), replica, rig.role)
    session = Session(Role.PREFILL, service._jobs, pb.Load)
    session.receive(submit(1))
    service._on_death(MemoryError())
    assert (await next_of(session)).step.failed[0].code == pb.ERROR_CODE_INTERNAL
    assert service.dead.is_set()
    session.receive(submit(2))
    assert (await next_of(session)).step.failed[0].code == pb.ERROR_CODE_UNAVAILABLE
