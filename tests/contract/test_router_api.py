"""The OpenAI API of a real router process: what is asked of the (fake) workers, and what the client reads."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slipstream.block_hash import content_hash
from slipstream.checkpoint import DEMO
from slipstream.text.chat import ChatTemplate
from slipstream.types import FinishReason, Role
from tests.support.fake_workers import Plan
from tests.support.scripted_router import CHECKPOINT, CONTEXT, EOS, MODEL, Front, Later, front

PAD = CHECKPOINT.image_token_id


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("router")) as one:
        yield one


def picture(height: int, width: int, seed: int = 0) -> tuple[str, bytes]:
    """(data URL, pixels)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode(), pixels.tobytes()


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


# Answers ---------------------------------------------------------------------------------------------------------------


def test_chat(router: Front) -> None:
    tokens = router.answer("Hello there.")
    reply = router.chat("hi", temperature=0)
    assert reply.status_code == 200
    body = reply.json()
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["choices"][0]["message"]["content"] == "Hello there."
    assert body["choices"][0]["finish_reason"] == "stop"
    prompt = len(router.stage.last.submits[Role.PREFILL][0].tokens)
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        prompt,
        len(tokens),
        prompt + len(tokens),
    )


def test_what_workers_are_asked(router: Front) -> None:
    router.answer("ok")
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    reply = router.post(
        "/v1/chat/completions",
        {"model": MODEL, "messages": messages, "temperature": 0.5, "top_p": 0.75, "seed": 7, "max_tokens": 9},
        {"x-request-timeout-seconds": "20"},
    )
    assert reply.status_code == 200
    seen = router.stage.last
    prefill, decode = seen.submits[Role.PREFILL][0], seen.submits[Role.DECODE][0]
    text = ChatTemplate(DEMO, str).render(messages)
    assert list(prefill.tokens) == list(decode.tokens) == router.tokenizer.encode(text)
    assert prefill.transfer_id == decode.transfer_id != ""
    assert prefill.request_id == decode.request_id != ""
    assert list(decode.prefill_addresses) == [router.workers[Role.PREFILL].address]
    assert decode.prefill_epoch == router.workers[Role.PREFILL].info.epoch
    for submit in (prefill, decode):
        assert submit.attempt == 0
        assert (submit.sampling.temperature, submit.sampling.top_p, submit.sampling.seed) == (0.5, 0.75, 7)
        assert set(submit.stop_token_ids) >= CHECKPOINT.eos_token_ids
        assert submit.max_tokens == 9
        assert 0 < submit.remaining_ms <= 20_000


def test_seeds_differ_where_none_is_given(router: Front) -> None:
    seeds = set()
    for _ in range(3):
        router.answer("ok")
        assert router.chat("same").status_code == 200
        seeds.add(router.stage.last.submits[Role.DECODE][0].sampling.seed)
    assert len(seeds) == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 16])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_is_exact(router: Front, stream: bool, limit: int, field: str) -> None:
    router.stage.next(Plan(tokens=tuple(range(100, 150))))
    if stream:
        wanted: dict[str, Any] = {field: limit, "stream_options": {"include_usage": True}}
        answer = router.stream(**wanted)
        assert answer.reasons == ["length"]
        usage, text = answer.chunks[-1]["usage"], answer.text
    else:
        plain: dict[str, Any] = {field: limit}
        body = router.chat(**plain).json()
        assert body["choices"][0]["finish_reason"] == "length"
        usage, text = body["usage"], body["choices"][0]["message"]["content"]
    assert usage["completion_tokens"] == limit
    assert text == router.tokenizer.decode(range(100, 100 + limit))


@pytest.mark.parametrize("stream", [False, True])
def test_first_token_that_ends(router: Front, stream: bool) -> None:
    router.stage.next(Plan(tokens=(EOS,)))
    if stream:
        answer = router.stream(stream_options={"include_usage": True})
        assert (answer.text, answer.reasons, answer.chunks[-1]["usage"]["completion_tokens"]) == ("", ["stop"], 1)
    else:
        body = router.chat().json()
        assert body["choices"][0]["message"]["content"] == ""
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("prompt", ["text", ["text"], "ids", ["ids"]])
def test_completions(router: Front, prompt: Any) -> None:
    ids = router.tokenizer.encode("Count to three")
    value: Any = ids if "ids" in prompt else "Count to three"
    router.answer(" one two three")
    reply = router.post("/v1/completions", {"model": MODEL, "prompt": [value] if isinstance(prompt, list) else value})
    assert reply.status_code == 200, reply.text
    assert reply.json()["object"] == "text_completion"
    assert reply.json()["choices"][0]["text"] == " one two three"
    assert list(router.stage.last.submits[Role.PREFILL][0].tokens) == ids


def test_two_requests_of_one_name_at_once(router: Front) -> None:
    """The name is the client's; both are answered, each with its own text, in whatever order they end."""
    named = {"x-request-id": "twice"}
    router.answer("the first", hold_at=1)
    first = Later(router.stream, headers=named)
    held = router.held()
    router.answer("the second")
    assert router.stream(headers=named).text == "the second"
    assert not held.cancels[Role.DECODE]
    router.stage.release(held)
    assert (first.result().text, first.result().errors) == ("the first", [])


def test_models(router: Front) -> None:
    with router.client() as client:
        card = client.get("/v1/models").json()["data"][0]
        assert card["id"] == MODEL
        assert CONTEXT in card.values()
        assert client.get(f"/v1/models/{MODEL}").json() == card
        assert client.get("/v1/models/none").status_code == 404


# Streams ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_streams_without_usage(router: Front, options: Any) -> None:
    router.answer("one two three")
    answer = router.stream(**({} if options is None else {"stream_options": options}))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text == "one two three"
    assert answer.reasons == ["stop"]
    assert answer.events[-1] == "[DONE]"
    assert answer.events.count("[DONE]") == 1
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in answer.chunks)
    assert answer.chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in answer.chunks[1:])
    assert answer.chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in answer.chunks}) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_streams_with_usage(router: Front, path: str) -> None:
    tokens = router.answer("one two three")
    prompt: dict[str, Any] = {} if "chat" in path else {"prompt": "x"}
    answer = router.stream(path, stream_options={"include_usage": True}, **prompt)
    *content, last = answer.chunks
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in content)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(tokens)
    assert answer.events[-2:] == [last, "[DONE]"]


def test_the_first_token_comes_at_once(router: Front) -> None:
    """It is prefill's; decode has not said anything yet."""
    router.answer("one two three", hold_at=1)
    with router.open() as response:
        lines = response.iter_lines()
        first = next(line for line in lines if line)
        assert json.loads(first[6:])["choices"][0]["delta"]["content"]
        seen = router.held()
        assert not seen.released.is_set()
        router.stage.release(seen)
        assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("text", ["Příliš žluťoučký kůň, ďábel", "👩‍👩‍👧‍👦 ok 🇨🇿", "漢字と仮名"])
def test_no_character_is_cut(router: Front, text: str) -> None:
    router.answer(text)
    answer = router.stream()
    assert answer.text == text
    assert not any("\ufffd" in json.dumps(chunk, ensure_ascii=False) for chunk in answer.chunks)


def test_tokens_out_of_order_and_twice(router: Front) -> None:
    router.answer("The quick brown fox jumps over the lazy dog.", mess=True)
    assert router.chat().json()["choices"][0]["message"]["content"] == "The quick brown fox jumps over the lazy dog."


# Stop strings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    ("text", "stop", "wanted"),
    [
        ("ABC DEFGHIJ and more", "DEFGHIJ", "ABC "),
        ("ABC DEFGHIJ", ["zz", "C D"], "AB"),
        ("aab aaab", "aaab", "aab "),
        ("no stop here", "never", "no stop here"),
        ("ends with a begin", "beginning", "ends with a begin"),
        ("x", "x", ""),
        ("p b,d q b,c r", "b,c", "p b,d q "),
        ("kůň žluťoučký", "žlu", "kůň "),
    ],
)
def test_stop_strings(router: Front, text: str, stop: Any, wanted: str, batch: int) -> None:
    tokens = router.answer(text, batch=batch)
    whole = router.chat(stop=stop).json()
    assert whole["choices"][0]["message"]["content"] == wanted
    assert whole["choices"][0]["finish_reason"] == "stop"
    router.answer(text, batch=batch)
    answer = router.stream(stop=stop, stream_options={"include_usage": True})
    assert answer.text == wanted
    assert answer.reasons == ["stop"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer.chunks[-1]["usage"][name] == whole["usage"][name]
    counted = whole["usage"]["completion_tokens"]
    stops = [stop] if isinstance(stop, str) else stop
    texts = [router.tokenizer.decode(tokens[:count]) for count in range(len(tokens) + 1)]
    complete = [count for count, one in enumerate(texts) if any(word in one for word in stops)]
    assert counted == (complete[0] if complete else len(tokens)), "tokens past the stop are not counted"


def test_a_stop_string_ends_the_work(router: Front) -> None:
    router.answer("one STOP two three four", hold_at=8)
    assert router.chat(stop="STOP").json()["choices"][0]["message"]["content"] == "one "
    seen = router.stage.last
    router.stage.until(lambda: bool(seen.cancels[Role.DECODE]), "decode is told")


def test_only_what_can_become_a_stop_is_held_back(router: Front) -> None:
    router.answer("one two three", hold_at=3)
    with router.open(stop="three four five six") as response:
        lines = (json.loads(line[6:]) for line in response.iter_lines() if line)
        router.held()
        shown = ""
        want = router.tokenizer.decode(router.stage.last.plan.tokens[:3])
        while len(shown) < len(want):
            shown += next(lines)["choices"][0]["delta"].get("content", "")
        assert shown == want
        router.stage.release(router.stage.last)


# Pictures --------------------------------------------------------------------------------------------------------------


def test_pictures_go_to_prefill_by_name(router: Front) -> None:
    first, pixels = picture(64, 96, 1)
    second, others = picture(32, 32, 2)
    router.answer("ok")
    puts = router.stage.puts
    reply = router.chat(
        [
            {"type": "text", "text": "a <|image_pad|> b"},
            image_part(first),
            image_part(second),
            {"type": "text", "text": "c"},
            image_part(first),
        ]
    )
    assert reply.status_code == 200, reply.text
    seen = router.stage.last
    prefill, decode = seen.submits[Role.PREFILL][0], seen.submits[Role.DECODE][0]
    assert list(decode.images) == list(prefill.images), "their names, for cached blocks; no pixels"
    assert list(decode.tokens) == list(prefill.tokens)
    names = [content_hash(64, 96, pixels), content_hash(32, 32, others), content_hash(64, 96, pixels)]
    assert [image.content_hash for image in prefill.images] == names
    assert [(image.grid_t, image.grid_h, image.grid_w) for image in prefill.images] == [(1, 4, 6), (1, 2, 2), (1, 4, 6)]
    runs = [run for run in "".join("x" if token == PAD else " " for token in prefill.tokens).split(" ") if run]
    assert [len(run) for run in runs] == [6, 1, 6]
    stored = router.workers[Role.PREFILL].images
    assert stored[names[0]] == (64, 96, pixels)
    assert stored[names[1]] == (32, 32, others)
    assert router.stage.puts - puts <= 2, "the same picture travels once"
    assert not router.workers[Role.DECODE].images


def test_a_video_goes_to_prefill_in_groups_of_frames(router: Front) -> None:
    """Five frames are three groups, each behind its time; the last frame is there twice."""
    frames = [picture(64, 96, seed) for seed in range(5)]
    router.answer("ok")
    reply = router.chat([{"type": "text", "text": "watch"}, {"type": "video", "video": [url for url, _ in frames], "fps": 1}])
    assert reply.status_code == 200, reply.text
    submit = router.stage.last.submits[Role.PREFILL][0]
    groups = [frames[0][1] + frames[1][1], frames[2][1] + frames[3][1], frames[4][1] * 2]
    assert [(image.grid_t, image.grid_h, image.grid_w) for image in submit.images] == [(1, 4, 6)] * 3
    assert [image.content_hash for image in submit.images] == [content_hash(64, 96, group) for group in groups]
    assert [router.workers[Role.PREFILL].images[image.content_hash] for image in submit.images] == [
        (64, 96, group) for group in groups]
    text = router.tokenizer.decode(submit.tokens)
    assert [time in text for time in ("watch<0.5 seconds>", "<2.5 seconds>", "<4.0 seconds>")] == [True] * 3
    assert sum(token == CHECKPOINT.video_token_id for token in submit.tokens) == 18


def test_a_string_as_image_url_is_accepted_or_named(router: Front) -> None:
    url, _ = picture(32, 32)
    router.answer("ok")
    assert router.chat([{"type": "image_url", "image_url": url}]).status_code in (200, 400)
    router.stage.plans.clear()


@pytest.mark.parametrize(("height", "width"), [(26, 28), (27, 332)])
@pytest.mark.parametrize("stream", [False, True])
def test_small_pictures_grow(router: Front, height: int, width: int, stream: bool) -> None:
    router.answer("ok")
    content = [image_part(picture(height, width)[0])]
    answer = router.stream(messages=[{"role": "user", "content": content}]) if stream else router.chat(content)
    assert (answer.status if stream else answer.status_code) == 200  # type: ignore[union-attr]
    assert len(router.stage.last.submits[Role.PREFILL][0].images) == 1


# Clients ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_report(router: Front, stream: bool) -> None:
    headers = {"x-slipstream-report": "1"}
    router.answer("one two")
    if stream:
        with_report = [chunk for chunk in router.stream(headers=headers).chunks if "slipstream" in chunk]
        assert len(with_report) == 1
        report = with_report[0]["slipstream"]
    else:
        report = router.chat(headers=headers).json()["slipstream"]
    assert set(report) == {
        "kv_bytes",
        "state_bytes",
        "transfer_seconds",
        "queue_seconds",
        "prefill_seconds",
        "ttft_seconds",
        "decode_seconds",
        "cached_tokens",
        "resumes",
    }
    assert (report["kv_bytes"], report["state_bytes"], report["transfer_seconds"]) == (1000, 24, 0.125)
    assert (report["queue_seconds"], report["prefill_seconds"], report["decode_seconds"]) == (0.25, 0.5, 2.0)
    assert 0 < report["ttft_seconds"] < 10
    router.answer("one")
    assert "slipstream" not in router.chat().json()


def test_the_prompts_end_is_the_contexts_end(router: Front) -> None:
    """One token of room gives one token; the default is what remains."""
    ids = [100] * (CONTEXT - 1)
    router.stage.next(Plan(tokens=(101, 102), reason=FinishReason.LENGTH))
    body = router.post("/v1/completions", {"model": MODEL, "prompt": ids}).json()
    assert body["usage"]["completion_tokens"] == 1
    assert body["choices"][0]["finish_reason"] == "length"
    router.answer("ok")
    assert router.post("/v1/completions", {"model": MODEL, "prompt": ids[:100]}).status_code == 200
    assert router.stage.last.submits[Role.DECODE][0].max_tokens == CONTEXT - 100
