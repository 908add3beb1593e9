"""A router as the official OpenAI client talks to it: pictures, tokens, echo, and what it may not be told.
"""

from __future__ import annotations

import base64
import http.server
import json
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import openai
import pytest

from slipstream.types import Role
from tests.support.fake_workers import Plan
from tests.support.scripted_router import CHAT, COMPLETIONS, MODEL, Front, events, front, picture, refused
from tests.support.talking import CALLS, ITEMS, TALK, WEATHER, checkpoint, replaced

ASK: list[Any] = [{"role": "user", "content": "What is the weather?"}]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("router")
    fetch = ('router.fetch.domains=["127.0.0.1"]', 'router.fetch.networks=["127.0.0.1/32"]', "router.fetch.seconds=1.5")
    with front(folder, f"model.path={checkpoint(folder)}", *fetch) as one:
        yield one


@pytest.fixture(scope="module")
def client(router: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as one:
        yield one


@pytest.fixture
async def async_client(router: Front) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as one:
        yield one


# Pictures and videos ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[str]:
    """A server with one picture."""
    data = base64.b64decode(picture(32, 32)["image_url"]["url"].partition(",")[2])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/slow":
                threading.Event().wait(3.0)
            with suppress(ConnectionError):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(data if self.path == "/picture.png" else b"x" * 100)

        def log_message(self, *words: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_pictures_by_url_and_by_data(router: Front, client: openai.OpenAI, elsewhere: str) -> None:
    parts: Any = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": f"{elsewhere}/picture.png"}}]
    router.answer("ok")
    messages: Any = [{"role": "user", "content": [*parts, picture(32, 32), parts[1]]}]
    client.chat.completions.create(model=MODEL, messages=messages)
    images = router.stage.last.submits[Role.PREFILL][0].images
    assert len({image.content_hash for image in images}) == 1
    assert len(images) == 3


@pytest.mark.parametrize(("path", "words"), [("/text", "not a picture"), ("/slow", "within 1.5 seconds")])
def test_urls_of_no_picture(router: Front, elsewhere: str, path: str, words: str) -> None:
    part = {"type": "image_url", "image_url": {"url": elsewhere + path}}
    assert words in refused(router.chat([part]), param="messages[0].content[0].image_url")["message"]


def test_a_slow_server_delays_nobody_else(router: Front, elsewhere: str) -> None:
    part = {"type": "image_url", "image_url": {"url": f"{elsewhere}/slow"}}
    waiting = [threading.Thread(target=router.chat, args=([part],)) for _ in range(4)]
    for thread in waiting:
        thread.start()
    router.answer("at once")
    assert router.chat(headers={"x-request-timeout-seconds": "1"}).status_code == 200
    for thread in waiting:
        thread.join()


def test_a_video_as_frames(router: Front, client: openai.OpenAI) -> None:
    """In both spellings, four frames are two groups with their times."""
    urls = [picture(32, 32, shade)["image_url"]["url"] for shade in (0, 9, 99, 199)]
    frames = ",".join(url.partition(",")[2] for url in urls)
    for part in (
        {"type": "video", "video": urls, "fps": 1},
        {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frames}"}, "timestamps": [0, 1, 2, 3]},
    ):
        messages: Any = [{"role": "user", "content": [part, {"type": "text", "text": "What moves?"}]}]
        router.answer("ok")
        client.chat.completions.create(model=MODEL, messages=messages)
        assert len(router.stage.last.submits[Role.PREFILL][0].images) == 2
        assert "<0.5 seconds>" in router.prompt


def test_a_video_whose_frames_are_elsewhere(router: Front, elsewhere: str) -> None:
    urls = [f"{elsewhere}/picture.png", picture(32, 32, 9)["image_url"]["url"], f"{elsewhere}/picture.png"]
    router.answer("ok")
    assert router.chat([{"type": "video", "video": urls}]).status_code == 200
    assert len(router.stage.last.submits[Role.PREFILL][0].images) == 2
    error = refused(router.chat([{"type": "video", "video": [*urls, f"{elsewhere}/text"]}]),
                    param="messages[0].content[0].video[3]")
    assert "not a picture" in error["message"]
    refused(router.chat([{"type": "video_url", "video_url": {"url": f"{elsewhere}/film.mp4"}}]),
            param="messages[0].content[0].video_url")


# Tokens, echo ----------------------------------------------------------------------------------------------------------


def test_tokens_and_back(router: Front) -> None:
    text = "Žďár 🙂 <|im_end|> 北京"
    reply = router.post("/tokenize", {"model": MODEL, "prompt": text, "return_token_strs": True})
    body = reply.json()
    assert body["tokens"] == router.tokenizer.encode(router.tokenizer.quote(text))
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert router.post("/detokenize", {"tokens": body["tokens"]}).json() == {"prompt": text}
    assert router.post("/detokenize", {"tokens": [1913]}).json() == {"prompt": "<|im_end|>"}
    assert router.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_tokens_of_a_chat_are_those_of_its_request(router: Front) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, picture(64, 64)]}],
        "tools": [WEATHER],
        "chat_template_kwargs": {"enable_thinking": True},
    }
    tokens = router.post("/tokenize", body).json()["tokens"]
    router.answer("ok")
    assert router.post(CHAT, body).status_code == 200
    assert tokens == list(router.stage.last.submits[Role.PREFILL][0].tokens)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": 5}, 400),
        ("/tokenize", {"prompt": ""}, 400),
        ("/tokenize", [], 400),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404),
        ("/tokenize", {"prompt": "x", "unheard": 1}, 400),
        ("/tokenize", {"messages": []}, 400),
        ("/tokenize", {"prompt": "x " * 50_000}, 400),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": False}, 400),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [1 << 40]}, 400),
        ("/detokenize", {"tokens": ["1"]}, 400),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404),
        ("/detokenize", {"tokens": [1], "unheard": 1}, 400),
    ],
)
def test_tokens_of_nothing(router: Front, path: str, body: Any, status: int) -> None:
    refused(router.post(path, body), status)


@pytest.mark.parametrize("ids", [False, True])
def test_echo(router: Front, client: openai.OpenAI, ids: bool) -> None:
    prompt: Any = router.tokenizer.encode("Count 北京:") if ids else "Count 北京:"
    tokens = router.answer(" one two")
    whole = client.completions.create(model=MODEL, prompt=prompt, echo=True)
    assert whole.choices[0].text == "Count 北京: one two"
    assert whole.usage
    assert whole.usage.completion_tokens == len(tokens)
    router.answer(" one two")
    stream = client.completions.create(model=MODEL, prompt=prompt, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Count 北京: one two"


def test_echo_of_every_choice(router: Front) -> None:
    router.answer(" b")
    answer = router.stream(COMPLETIONS, prompt="a", echo=True, n=2)
    texts = {0: "", 1: ""}
    for chunk in answer.chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "a b", 1: "a b"}


# Plain clients ---------------------------------------------------------------------------------------------------------


def test_plain_events(router: Front) -> None:
    """As any reader of server-sent events sees a call: lines of data, one object each, and [DONE]."""
    router.answer(CALLS["json"])
    with router.open(tools=[WEATHER], stream_options={"include_usage": True}) as response:
        seen = list(events(response))
    assert seen[-1] == "[DONE]"
    assert seen[-2]["choices"] == []
    first = seen[0]["choices"][0]["delta"]
    assert first["role"] == "assistant"
    calls = [
        chunk["choices"][0]["delta"]["tool_calls"][0] for chunk in seen[:-2] if chunk["choices"][0]["delta"].get("tool_calls")
    ]
    assert calls[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert calls[0]["type"] == "function"
    assert all(set(call) == {"index", "function"} for call in calls[1:])


def test_priority_and_user(router: Front, client: openai.OpenAI) -> None:
    router.answer("ok")
    client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        user="me",
        seed=5,
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        logit_bias={"100": 3},
        extra_body={"priority": -3},
    )
    submit = router.stage.last.submits[Role.PREFILL][0]
    assert (submit.priority, submit.sampling.seed) == (-3, 5)


def test_the_next_request_is_served(router: Front) -> None:
    refused(
        router.post(CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "reasoning_effort": "none of these"})
    )
    router.answer("fine")
    assert router.chat().json()["choices"][0]["message"]["content"] == "fine"


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/tokenize"])
def test_random_conversations_never_break_it(router: Front, path: str) -> None:
    """Bodies with one value anywhere replaced: refused or answered, never a fault."""
    chance = random.Random(7)
    values: list[Any] = [None, True, -1, 1.5, 1 << 64, "", "x", "<|im_end|>", "\\ud800"]
    values += [[], {}, [[]], {"a": {"b": []}}, [None], {"type": "text"}]
    router.stage.default = Plan(tokens=(*router.tokenizer.encode(CALLS["xml"]), 1913))
    body = {**(ITEMS if path == "/v1/responses" else TALK), **({} if path == "/tokenize" else {"stream": True})}
    assert router.post(path, body).status_code == 200
    answered = 0
    with router.client() as client:
        for _ in range(150):
            steps = [chance.randrange(30) for _ in range(chance.randrange(1, 8))]
            reply = client.post(path, content=json.dumps(replaced(body, steps, chance.choice(values))))
            assert reply.status_code in (200, 400, 404), reply.text
            answered += reply.status_code == 200
    assert 10 < answered < 140
    router.stage.default = Plan()
