"""What goes wrong between real prefill and decode processes costs one request, is told at once, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import grpc.aio
import pytest

from slipstream.types import FinishReason
from slipstream.v1 import worker_pb2 as pb
from tests.support.cluster import Cluster
from tests.support.worker_client import Answer, Pair, Prompt, Worker, pair

LEASE_SECONDS = 2.0
SHORT = Prompt(tokens=range(40, 60), max_tokens=12, ignore_eos=True)
SLOW = Prompt(tokens=[20 + i % 180 for i in range(900)], max_tokens=4, ignore_eos=True, fresh=True)
"""Takes seconds to compute: its replica takes one token a step."""
LONG = Prompt(tokens=range(40, 60), max_tokens=3000, ignore_eos=True)
"""Takes many seconds to decode."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("failures"))
    lease = f"transfer.lease_seconds={LEASE_SECONDS}"
    cluster.start_workers("prefill", "decode", overrides=[lease, "engine.prefill_chunk_tokens=1"])
    yield cluster
    complaints = [line for running in cluster.processes.values() for line in running.complaints()]
    codes = cluster.close()
    assert set(codes.values()) == {0}
    assert not complaints, "a failed request is no fault of the process"


@pytest.fixture
async def both(cluster: Cluster) -> AsyncIterator[Pair]:
    async with pair(cluster.processes["prefill-0"].address, cluster.processes["decode-0"].address) as both:
        yield both
        await both.until_empty()


@pytest.fixture(scope="module")
def answers(cluster: Cluster) -> dict[str, list[int]]:
    """What the short prompt is answered when nothing is wrong."""
    async def ask() -> Answer:
        async with pair(cluster.processes["prefill-0"].address, cluster.processes["decode-0"].address) as both:
            return await both.ask(SHORT)

    answer = asyncio.run(ask())
    assert len(answer.tokens) == SHORT.max_tokens
    return {"short": answer.tokens}


async def start(both: Pair, prompt: Prompt) -> tuple[pb.Submit, pb.Submit]:
    """Both legs run when this returns, and the destination holds memory for the prompt."""
    to_prefill, to_decode = await both.submits(prompt)
    await both.prefill.submit(to_prefill)
    await both.decode.submit(to_decode)
    await both.decode.until(lambda: both.decode.load.free_blocks < both.decode.info.total_blocks)
    return to_prefill, to_decode


# Cancel ---------------------------------------------------------------------------------------------------------------


async def test_cancel_in_the_middle_of_a_transfer(both: Pair, answers: dict[str, list[int]]) -> None:
    to_prefill, _ = await start(both, SLOW)
    handle = to_prefill.handle
    began = time.monotonic()
    one, other = await both.prefill.cancel(handle), await both.decode.cancel(handle)
    assert (await one.failed(1)).code == pb.ERROR_CODE_CANCELLED
    assert (await other.failed(1)).code == pb.ERROR_CODE_CANCELLED
    assert time.monotonic() - began < 1.0
    assert not one.tokens, "it was still computing"
    await both.until_empty()
    assert (await both.ask(SHORT)).tokens == answers["short"]


async def test_cancel_of_one_leg_is_told_to_the_other(both: Pair) -> None:
    to_prefill, to_decode = await both.submits(SLOW)
    await both.prefill.submit(to_prefill)
    other = await both.decode.submit(to_decode)
    await both.decode.until(lambda: both.decode.load.free_blocks < both.decode.info.total_blocks)
    await both.prefill.cancel(to_prefill.handle)
    assert (await other.failed(1)).code == pb.ERROR_CODE_CANCELLED


async def test_cancel_in_the_middle_of_decoding(both: Pair) -> None:
    to_prefill, to_decode = await both.submits(LONG)
    one, other = await both.prefill.submit(to_prefill), await both.decode.submit(to_decode)
    await other.token(5)
    assert (await one.finished(5)).handed_off
    await both.decode.cancel(to_decode.handle)
    assert (await other.failed(1)).code == pb.ERROR_CODE_CANCELLED


async def test_cancel_before_submit(both: Pair) -> None:
    to_prefill, _ = await both.submits(SHORT)
    leg = await both.prefill.cancel(to_prefill.handle)
    assert (await leg.failed(1)).code == pb.ERROR_CODE_CANCELLED
    leg.ends.clear()
    leg.over.clear()
    await both.prefill.submit(to_prefill)
    assert (await leg.failed(1)).code == pb.ERROR_CODE_CANCELLED
    assert not leg.tokens


async def test_cancel_while_a_picture_is_awaited(both: Pair) -> None:
    to_prefill, _ = await both.submits(SHORT)
    to_prefill.images.append(pb.Image(content_hash=bytes(16), grid_t=1, grid_h=4, grid_w=4))
    leg = await both.prefill.submit(to_prefill)
    await both.prefill.cancel(to_prefill.handle)
    assert (await leg.failed(1)).code == pb.ERROR_CODE_CANCELLED


@pytest.mark.long
async def test_two_hundred_requests_that_are_left_at_any_moment(both: Pair, answers: dict[str, list[int]]) -> None:
    """Either leg first, before, at and after the end of prefill, in the hand-off and in decoding (KV-01, KV-03)."""
    rng = random.Random(11)
    room, began = asyncio.Semaphore(12), time.monotonic()
    await both.ask(replace(SHORT, fresh=True))
    alone = time.monotonic() - began
    seen: Counter[str] = Counter()

    async def one() -> None:
        async with room:
            prompt = replace(rng.choice((SHORT, LONG)), fresh=rng.random() < 0.7)
            to_prefill, to_decode = await both.submits(prompt)
            leg, other = await both.prefill.submit(to_prefill), await both.decode.submit(to_decode)
            moment = rng.choice(("any", "any", "first token", "decoding"))
            if moment == "any":
                await asyncio.sleep(rng.random() * alone * 2)
            else:
                await (leg.token(0) if moment == "first token" else other.token(rng.randrange(1, 4)))
            for side in rng.sample((both.prefill, both.decode), 2):
                await side.cancel(to_prefill.handle)
                await asyncio.sleep(rng.choice((0.0, 0.05)))
            await asyncio.wait_for(asyncio.gather(leg.over.wait(), other.over.wait()), 5)
            for end in (leg.end, other.end):
                seen["ok" if isinstance(end, pb.Finished) else pb.ErrorCode.Name(end.code)] += 1

    await asyncio.gather(*(one() for _ in range(200)))
    await both.until_empty(5)
    assert (await both.ask(SHORT)).tokens == answers["short"]
    assert seen["ERROR_CODE_CANCELLED"] > 100 < seen["ok"] + 100, seen
    assert not seen.keys() - {"ok", *(f"ERROR_CODE_{name}" for name in ("CANCELLED", "UNAVAILABLE", "LEASE_EXPIRED"))}, seen


# Sessions, deadlines, leases ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [SLOW, LONG], ids=["transfer", "decoding"])
async def test_a_lost_session_gives_everything_back(cluster: Cluster, both: Pair, prompt: Prompt) -> None:
    async with pair(both.prefill.address, both.decode.address) as doomed:
        to_prefill, to_decode = await doomed.submits(prompt)
        await doomed.prefill.submit(to_prefill)
        other = await doomed.decode.submit(to_decode)
        if prompt is LONG:
            await other.token(3)
        else:
            await doomed.decode.until(lambda: doomed.decode.load.free_blocks < doomed.decode.info.total_blocks)
    await both.until_empty(seconds=5)


async def test_a_half_closed_session_ends_its_requests(both: Pair) -> None:
    doomed = Worker(both.decode.address)
    await doomed.open()
    _, to_decode = await both.submits(SHORT)
    await doomed.submit(to_decode)  # waits for a prompt that nobody computes
    await doomed.call.done_writing()
    assert doomed._reader is not None
    await asyncio.wait_for(doomed._reader, 5)
    assert await doomed.call.code() is grpc.StatusCode.OK
    await doomed.close()


async def test_the_deadline_holds_on_both_sides(both: Pair) -> None:
    to_prefill, to_decode = await both.submits(SLOW, seconds=0.7)
    one, other = await both.prefill.submit(to_prefill), await both.decode.submit(to_decode)
    assert (await one.failed(3)).code == pb.ERROR_CODE_DEADLINE
    assert (await other.failed(3)).code == pb.ERROR_CODE_DEADLINE


async def test_a_prompt_that_nobody_takes_is_given_up_after_its_lease(both: Pair) -> None:
    to_prefill, _ = await both.submits(SHORT)
    began = time.monotonic()
    leg = await both.prefill.submit(to_prefill)
    await leg.token(0)
    assert (await leg.failed(LEASE_SECONDS + 3)).code == pb.ERROR_CODE_LEASE_EXPIRED
    assert time.monotonic() - began >= LEASE_SECONDS * 0.9
    assert leg.end.retry_after_ms > 0  # type: ignore[union-attr]


# Bad requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "words"), [
    (lambda submit: submit.tokens.__setitem__(0, 1 << 30), "vocabulary"),
    (lambda submit: submit.ClearField("tokens"), "empty"),
    (lambda submit: setattr(submit, "max_tokens", 0), "max_tokens"),
    (lambda submit: setattr(submit.sampling, "temperature", float("nan")), "temperature"),
    (lambda submit: submit.tokens.extend([7] * 100_000), "context window"),
    (lambda submit: setattr(submit, "request_id", ""), "request_id"),
], ids=["token", "empty", "max_tokens", "nan", "long", "name"])
async def test_a_bad_request_fails_alone(both: Pair, answers: dict[str, list[int]], change: object, words: str) -> None:
    to_prefill, to_decode = await both.submits(SHORT)
    assert callable(change)
    change(to_prefill)
    change(to_decode)
    one, other = await both.prefill.submit(to_prefill), await both.decode.submit(to_decode)
    failed = await one.failed(5)
    assert failed.code == (pb.ERROR_CODE_CONTEXT_LENGTH if words == "context window" else pb.ERROR_CODE_INVALID)
    assert words in failed.message
    await both.decode.cancel(to_decode.handle)
    await other.failed(5)
    assert (await both.ask(SHORT)).tokens == answers["short"]


async def test_pictures_that_disagree_with_the_prompt(both: Pair) -> None:
    to_prefill, _ = await both.submits(SHORT)
    to_prefill.images.append(pb.Image(content_hash=bytes(16), grid_t=1, grid_h=4, grid_w=4))
    to_prefill.remaining_ms = 500
    leg = await both.prefill.submit(to_prefill)
    assert (await leg.failed(5)).code == pb.ERROR_CODE_DEADLINE, "the picture never came"
    with pytest.raises(grpc.aio.AioRpcError, match="takes no images"):
        await both.decode.stub.PutImage(iter([pb.ImageChunk(content_hash=bytes(16), height=32, width=32)]))
    with pytest.raises(grpc.aio.AioRpcError, match="multiples of"):
        await both.prefill.stub.PutImage(iter([pb.ImageChunk(content_hash=bytes(16), height=33, width=32)]))


async def test_a_transfer_id_is_used_once(both: Pair, answers: dict[str, list[int]]) -> None:
    to_prefill, to_decode = await both.submits(SHORT)
    twin, _ = await both.submits(SHORT)
    twin.transfer_id = to_prefill.transfer_id
    one = await both.prefill.submit(to_prefill)
    two = await both.prefill.submit(twin)
    failed = await two.failed(5)
    assert failed.code == pb.ERROR_CODE_INVALID
    assert "transfer id" in failed.message
    other = await both.decode.submit(to_decode)
    assert (await one.finished(5)).handed_off
    await other.finished(5)
    assert one.tokens | other.tokens == dict(enumerate(answers["short"])), "the first one is not disturbed"


async def test_a_wrong_epoch_or_address_is_told_quickly(both: Pair) -> None:
    for change in ({"prefill_epoch": 99}, {"prefill_addresses": ["127.0.0.1:1"]}):
        _, to_decode = await both.submits(SHORT)
        if "prefill_epoch" in change:
            to_decode.prefill_epoch = 99
        else:
            to_decode.prefill_addresses[:] = ["127.0.0.1:1"]
        leg = await both.decode.submit(to_decode)
        assert (await leg.failed(8)).code == pb.ERROR_CODE_UNAVAILABLE


# The end --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 16, 17])
async def test_exactly_max_tokens(both: Pair, count: int) -> None:
    answer = await both.ask(Prompt(tokens=range(40, 60), max_tokens=count, ignore_eos=True))
    assert (len(answer.tokens), answer.reason) == (count, FinishReason.LENGTH)


async def test_the_first_token_may_be_the_end(both: Pair, answers: dict[str, list[int]]) -> None:
    first = answers["short"][0]
    stopping = Prompt(tokens=SHORT.tokens, max_tokens=12, stop_ids=frozenset({first}))
    answer = await both.ask(stopping)
    assert (answer.tokens, answer.reason) == ([first], FinishReason.STOP)
    ignoring = Prompt(tokens=SHORT.tokens, max_tokens=12, stop_ids=frozenset({first}), ignore_eos=True)
    assert (await both.ask(ignoring)).tokens == answers["short"]


async def test_a_finished_prompt_does_not_wait_for_a_destination_that_never_comes(both: Pair) -> None:
    to_prefill, _ = await both.submits(Prompt(tokens=range(40, 60), max_tokens=1))
    leg = await both.prefill.submit(to_prefill)
    assert not (await leg.finished(5)).handed_off
    assert leg.reasons == {0: FinishReason.LENGTH}
    await both.prefill.until_empty(5)


async def test_names_are_the_routers_business_not_the_replicas(both: Pair, answers: dict[str, list[int]]) -> None:
    """Another attempt under the same request id, and two routers at once."""
    name = uuid.uuid4().hex
    async with pair(both.prefill.address, both.decode.address) as second:
        first = await both.submits(SHORT, name=name)
        again = await second.submits(SHORT, name=name)
        for submit in again:
            submit.attempt = 1
        legs = [await both.prefill.submit(first[0]), await both.decode.submit(first[1]),
                await second.prefill.submit(again[0]), await second.decode.submit(again[1])]
        for leg in legs:
            await leg.finished(10)
        for one, other in (legs[:2], legs[2:]):
            assert one.tokens | other.tokens == dict(enumerate(answers["short"]))

