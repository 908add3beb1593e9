"""A peer that breaks the protocol, or bytes that break on their way: one request fails with a typed error, all else goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from cache_transfer import frames, source
from cache_transfer.channels.grpc import InlineChannel
from cache_transfer.layout import Range
from cache_transfer.load import given
from cache_transfer.regions import Landing
from slipstream.errors import CoverageError, ProtocolError, TransferError
from slipstream.rpc.security import Security
from slipstream.rpc.server import listen, new_server
from slipstream.v1 import cache_store_pb2 as pb
from tests.support import transfer_rig
from tests.support.complaints import complaints
from tests.support.damage import Damaging
from tests.support.transfer_site import Site, destination, handoff, serving

LAYOUT = transfer_rig.layout()
KV, CONV = 4, 0  # tensors of the rig's layout
TOKENS = 17
HERE = Landing(blocks=(1, 50, 6, 22, 13), state_slot=2, have_tokens=4)
MARK = -7.0
ROW = LAYOUT.tensors[KV].unit_bytes


def data(*ranges: Range, payload: int) -> bytes:
    return frames.data_header(ranges, None) + bytes(payload)


HANDOFF = frames.control(handoff=frames.handoff_to_pb(handoff(TOKENS)))
SENT = frames.control(sent=pb.Sent())
TWICE = frames.handoff_to_pb(handoff(TOKENS))
TWICE.choices.add(choice=0, first_token=9)

RUBBISH = [b"", b"\x02", b"\x00\xff\xff", b"\x01", b"\x01" + bytes(9) + b"\xff\xff\xff\xff",
           b"\x01" + bytes(9) + b"\x01\x00\x00\x00", b"\x01\x02" + bytes(12),
           data(Range(KV, 0, 4), payload=4 * ROW), frames.control(),
           frames.control(ready=pb.Ready(have_tokens=(1 << 32) - 4)),
           frames.control(begin=pb.Begin()), frames.control(open=pb.Open()), frames.control(sent=pb.Sent())]


@pytest.mark.parametrize("rubbish", RUBBISH)
@pytest.mark.parametrize("when", ["first", "instead of Ready", "after Ready"])
async def test_rubbish_from_a_destination_fails_its_own_prompt_only(when: str, rubbish: bytes,
                                                                    caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as site, destination(site.address) as here:
        transfer, log = site.prompt("t", TOKENS)
        other, others = site.prompt("other", TOKENS)
        going_on = asyncio.create_task(here.load("other"))
        await others.until("ready")
        async with grpc.aio.insecure_channel(site.address) as channel:
            call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(f"/{frames.SERVICE}/Transfer")()
            if when != "first":
                await call.write(frames.control(open=pb.Open(transfer_id="t", epoch=1, request_id="r", remaining_ms=20_000,
                                                             channel="grpc", compatibility_hash=LAYOUT.hash)))
                assert await told(call) == "begin"
            if when == "after Ready":
                await call.write(frames.control(ready=pb.Ready()))
                await log.until("ready")
            await call.write(rubbish)
            answer = await told(call)
            assert answer in ("protocol", "transfer_failed"), answer
        if when == "first":
            assert not transfer.over
        else:
            await log.until_last("failed")
        site.compute(other, TOKENS)
        await (await going_on).close(committed=True)
        await others.until("ready", "done")
    assert not complaints(caplog)


async def told(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> str:
    """The kind of the source's next word, or the code of its failure."""
    frame = await call.read()
    assert isinstance(frame, bytes)
    message = frames.parse(frame)
    assert isinstance(message, pb.Control)
    return message.failed.code if message.WhichOneof("message") == "failed" else str(message.WhichOneof("message"))


@asynccontextmanager
async def scripted(script: Sequence[bytes], heard: list[str], tokens: int = TOKENS) -> AsyncIterator[str]:
    """A source that says all the right words up to Ready, and then these; `heard`: what the destination says to it."""
    async def hello(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return pb.HelloReply(replica_id="p0", epoch=1, compatible=True, channels={"grpc": b""},
                             layout=pb.Layout(hash=LAYOUT.hash, fields=LAYOUT.fields())).SerializeToString()

    async def transfer(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await anext(requests)
        await context.write(frames.control(begin=pb.Begin(num_tokens=tokens)))
        await anext(requests)
        for frame in script:
            await context.write(frame)
        async for frame in requests:
            message = frames.parse(frame)
            assert isinstance(message, pb.Control)
            heard.append(message.failed.code)

    server = new_server()
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Hello": grpc.unary_unary_rpc_method_handler(hello), "Transfer": grpc.stream_stream_rpc_method_handler(transfer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(frames.SERVICE, handlers),))
    yield await listen(server, "127.0.0.1:0")
    await server.stop(None)


@pytest.mark.parametrize(("script", "says"), [
    ([data(Range(KV, 0, 4), payload=4 * ROW)], "expected to go on from 4"),  # what the destination has
    ([data(Range(KV, 3, 2), payload=2 * ROW)], "expected to go on from 4"),
    ([data(Range(KV, 8, 4), payload=4 * ROW)], "expected to go on from 4"),
    ([data(Range(KV, 4, 14), payload=14 * ROW)], "up to 17"),
    ([data(Range(KV, 4, 1 << 62), payload=0)], "up to 17"),
    ([data(Range(99, 0, 1), payload=1)], "tensor 99"),
    ([data(Range(CONV, 0, 5), Range(CONV, 0, 5), payload=10)], "expected to go on from 5"),
    ([data(Range(KV, 4, 4), payload=4 * ROW - 1)], "payload bytes"),
    ([data(Range(KV, 4, 4), payload=4 * ROW + 1)], "payload bytes"),
    ([data(Range(KV, 4, 4), payload=0)[:-1]], "too short"),
    ([b""], "empty frame"), ([b"\x07"], "unknown kind"), ([b"\x00\xff\xff"], "no Control message"),
    ([frames.control()], "None in the middle"), ([frames.control(ready=pb.Ready())], "ready in the middle"),
    ([HANDOFF, HANDOFF], "handoff in the middle"),
    ([frames.control(handoff=TWICE)], "names a choice twice"),
    ([SENT], "without a Handoff"), ([HANDOFF, SENT], "of 17 units|of [0-9]+ units")])
async def test_rubbish_from_a_source_is_refused_before_it_lands(script: list[bytes], says: str,
                                                                caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []
    async with scripted(script, heard) as address, serving() as site, destination(address) as here:
        for tensor in here.held.values():
            tensor.fill_(MARK)
        with pytest.raises((ProtocolError, CoverageError), match=says) as error:
            await here.load("t", where=HERE)
        assert heard == [error.value.code]
        assert all(bool((tensor == MARK).all()) for tensor in here.held.values())
        site.compute(site.prompt("u", TOKENS)[0], TOKENS)
        await (await here.load("u", address=site.address)).close(committed=True)
    assert not complaints(caplog)


async def test_a_source_cannot_announce_more_than_the_router_told() -> None:
    async with scripted([], [], tokens=(1 << 32) - 1) as address, destination(address) as here:
        with pytest.raises(ProtocolError, match="sends 4294967295 tokens; rank 0 was told 17"):
            await here.loader.load([address], transfer_id="t", attempt=0, source_epoch=1, request_id="r", remaining_seconds=20,
                                   admit=given(HERE, TOKENS))


async def test_a_destination_opens_what_was_announced_by_its_id_and_request_only() -> None:
    async with serving(lease_seconds=0.3) as site, destination(site.address) as here:
        _, log = site.prompt("announced", TOKENS)
        for name, request in (("announced", "another"), ("announced/", "r"), ("", "r")):
            with pytest.raises(TransferError):
                await here.load(name, where=HERE, request=request)
        assert log.heard in ([], ["failed"]), "its lease runs, and nobody has come"


async def test_a_destination_without_the_token_gets_no_hello() -> None:
    trusted = Security(token="the token of the source")
    server, site = new_server(trusted), Site(InlineChannel())
    site.store.add_to(server)
    async with destination(await listen(server, "127.0.0.1:0", trusted)) as here:
        site.prompt("t", TOKENS)
        with pytest.raises(TransferError, match=r"UNAUTHENTICATED .*security\.token_file"):
            await here.load("t", seconds=3)
    await server.stop(None)


async def test_a_bit_that_flips_in_any_frame_is_never_committed() -> None:
    """Also of one layer among several whose other layers arrived whole."""
    broken = -1
    channel = Damaging(lambda number: number == broken)
    async with serving(channel, frame_bytes=1500) as site, destination(site.address) as here:
        site.compute(site.prompt("whole", TOKENS)[0], TOKENS)
        await (await here.load("whole")).close(committed=True)
        frames_of_a_prompt = channel.sent
        assert frames_of_a_prompt > 4
        for broken in range(frames_of_a_prompt):
            channel.sent = 0
            transfer, log = site.prompt(f"t{broken}", TOKENS)
            site.compute(transfer, TOKENS)
            with pytest.raises(CoverageError, match="checksum"):
                await here.load(f"t{broken}")
            await log.until("ready", "failed")
        assert site.store.open_transfers == 0


# After Failed --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def failed(site: Site) -> AsyncIterator[grpc.aio.StreamStreamCall[bytes, bytes]]:
    """A stream whose source has given up and said so."""
    transfer, log = site.prompt("t", TOKENS)
    async with grpc.aio.insecure_channel(site.address) as channel:
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(f"/{frames.SERVICE}/Transfer")()
        await call.write(frames.control(open=pb.Open(transfer_id="t", epoch=1, request_id="r", remaining_ms=20_000,
                                                     channel="grpc", compatibility_hash=LAYOUT.hash)))
        assert await told(call) == "begin"
        await call.write(frames.control(ready=pb.Ready()))
        await log.until("ready")
        transfer.fail(TransferError("no more"))
        assert await told(call) == "transfer_failed"
        yield call


async def test_a_slow_last_word_finds_the_stream_and_its_end_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is what says that nothing is written any more; a stream that is cancelled, or was there no more, says nothing."""
    monkeypatch.setattr(source, "_LAST_WORD_SECONDS", 0.1)
    async with serving() as site, failed(site) as call:
        await asyncio.sleep(0.3)
        await call.write(frames.control(busy=pb.Busy(reason="it gave this attempt up")))
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_a_destination_that_never_leaves_holds_a_failed_stream_for_a_while_only() -> None:
    async with serving(stall_seconds=0.3) as site, failed(site) as call:
        assert await asyncio.wait_for(call.read(), 5) is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
