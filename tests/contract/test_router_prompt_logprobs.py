"""Logprobs of prompts through a real router and scripted workers: echo as OpenAI has it, prompt_logprobs as vLLM has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from slipstream.types import Role
from slipstream.v1 import worker_pb2 as pb
from slipstream_client import ChatRequest, Client, GenerateRequest, InvalidRequestError, Stop, user
from tests.support.fake_workers import scores
from tests.support.scripted_router import CHAT, COMPLETIONS, MODEL, Front, Later, front, refused

PROMPT = "Grüße 世界 🙂: one"
LIMIT = 6000


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("scores"), f"router.max_prompt_logprobs={LIMIT}") as one:
        yield one


def completed(router: Front, stream: bool = False, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a text completion; of a stream with their pieces joined."""
    if not stream:
        reply = router.post(COMPLETIONS, {"model": MODEL, "prompt": PROMPT, **fields})
        assert reply.status_code == 200, reply.text
        found: list[dict[str, Any]] = reply.json()["choices"]
        return found
    answer = router.stream(COMPLETIONS, **{"prompt": PROMPT, **fields})
    assert not answer.errors
    joined: dict[int, dict[str, Any]] = {}
    for (piece,) in (chunk["choices"] for chunk in answer.chunks):
        one = joined.setdefault(piece["index"], {"text": "", "logprobs": None})
        one["text"] += piece["text"]
        one["finish_reason"] = piece["finish_reason"]
        if piece["logprobs"] is not None:
            one["logprobs"] = one["logprobs"] or {name: [] for name in piece["logprobs"]}
            for name, values in piece["logprobs"].items():
                one["logprobs"][name] += values
    return [joined[index] for index in sorted(joined)]


def check_echo(router: Front, choice: dict[str, Any], tokens: tuple[int, ...], output: int, top: int) -> None:
    """API-13: entries for all tokens, the first null, offsets that match the text."""
    found = choice["logprobs"]
    assert {len(column) for column in found.values()} == {len(tokens) + output}
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    assert found["token_logprobs"][1:] == [-i / 4 for i in range(1, len(tokens))] + [-i - 1 for i in range(output)]
    words = [router.tokenizer.word(token) for token in tokens]
    assert found["tokens"][: len(tokens)] == words
    for number in range(1, len(tokens)):
        others = {router.tokenizer.word(tokens[number] + 1 + j): -number / 8 - j for j in reversed(range(top))}
        assert found["top_logprobs"][number] == {**others, words[number]: -number / 4}
    for name, offset, following in zip(found["tokens"], found["text_offset"], [*found["text_offset"][1:], None], strict=True):
        if not name.startswith("bytes:"):  # part of a character
            assert choice["text"][offset:].startswith(name)
            assert following is None or following == offset + len(name)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize(("top", "n"), [(1, 1), (0, 1), (5, 2)])
def test_echo_with_logprobs(router: Front, stream: bool, ids: bool, top: int, n: int) -> None:
    tokens = tuple(router.tokenizer.encode(PROMPT))
    output = router.answer(" two three")
    choices = completed(router, stream, prompt=list(tokens) if ids else PROMPT, echo=True, logprobs=top, n=n)
    assert len(choices) == n
    for choice in choices:
        assert choice["text"] == PROMPT + " two three"
        check_echo(router, choice, tokens, len(output) - 1, top)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("echo", [True, False])
def test_no_output_at_all(router: Front, stream: bool, logprobs: int | None, echo: bool) -> None:
    """API-12."""
    router.answer("hidden")
    (choice,) = completed(router, stream, echo=echo, max_tokens=0, logprobs=logprobs)
    assert choice["text"] == (PROMPT if echo else "")
    assert choice["finish_reason"] == "length"
    if logprobs is None:
        assert choice["logprobs"] is None
    elif echo:
        check_echo(router, choice, tuple(router.tokenizer.encode(PROMPT)), 0, logprobs)
    else:
        assert not any((choice["logprobs"] or {}).values())
    assert router.stage.last.submits[Role.PREFILL][0].max_tokens == 1


def test_the_official_client_scores_a_text(router: Front) -> None:
    tokens = router.tokenizer.encode(PROMPT)
    router.answer("", stop=True)
    with openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(model=MODEL, prompt=PROMPT, echo=True, logprobs=1, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (PROMPT, "length")
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.token_logprobs or ()) == len(tokens)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        len(tokens), 0, len(tokens))


def check_scores(router: Front, told: list[dict[str, Any] | None], tokens: tuple[int, ...], top: int) -> None:
    assert told[0] is None
    assert len(told) == len(tokens)
    for number in range(1, len(tokens)):
        rows = {tokens[number]: (-number / 4, number)} | {tokens[number] + 1 + j: (-number / 8 - j, j + 1) for j in range(top)}
        assert told[number] == {
            str(id): {"logprob": logprob, "rank": rank,
                      "decoded_token": router.tokenizer.token_bytes(id).decode(errors="replace")}
            for id, (logprob, rank) in rows.items()}


@pytest.mark.parametrize("top", [0, 3])
def test_prompt_logprobs_of_completions_and_chats(router: Front, top: int) -> None:
    tokens = tuple(router.tokenizer.encode(PROMPT))
    router.answer(" two")
    choices = completed(router, prompt_logprobs=top, n=2)
    assert [choice["text"] for choice in choices] == [" two", " two"]
    for choice in choices:
        assert choice["logprobs"] is None
        check_scores(router, choice["prompt_logprobs"], tokens, top)
    router.answer(" two")
    answer = router.chat(prompt_logprobs=top, logprobs=True, top_logprobs=1).json()
    check_scores(router, answer["prompt_logprobs"], tuple(router.stage.last.submits[Role.PREFILL][0].tokens), top)
    assert "prompt_logprobs" not in answer["choices"][0]
    router.answer(" two")
    assert "prompt_logprobs" not in router.chat().json()


@pytest.mark.parametrize(("echoed", "told"), [(2, 1), (1, 2)])
def test_both_forms_at_once(router: Front, echoed: int, told: int) -> None:
    tokens = tuple(router.tokenizer.encode(PROMPT))
    output = router.answer(" two")
    (choice,) = completed(router, echo=True, logprobs=echoed, prompt_logprobs=told)
    check_scores(router, choice["prompt_logprobs"], tokens, told)
    check_echo(router, choice, tokens, len(output) - 1, echoed)


@pytest.mark.parametrize(("plan", "asked"), [
    ({"decode_error": pb.ERROR_CODE_UNAVAILABLE, "error_at": 2, "failures": 1}, [True, False]),
    ({"prefill_error": pb.ERROR_CODE_UNAVAILABLE, "failures": 1}, [True, True]),
    ({"busy": 2}, [True])], ids=["decode is lost", "prefill is lost", "busy"])
def test_they_are_told_once(router: Front, plan: dict[str, Any], asked: list[bool]) -> None:
    """Whoever computes the prompt is asked until they have come, and decode never."""
    router.answer(" two three four", **plan)
    (choice,) = completed(router, stream=True, echo=True, logprobs=1)
    check_echo(router, choice, tuple(router.tokenizer.encode(PROMPT)), len(router.tokenizer.encode(" two three four")), 1)
    submits = router.stage.last.submits
    assert [submit.HasField("prompt_logprobs") for submit in submits[Role.PREFILL]] == asked
    assert not any(submit.HasField("prompt_logprobs") for submit in submits[Role.DECODE])


def test_decode_that_computes_the_prompt_tells_them(tmp_path: Path) -> None:
    with front(tmp_path, "router.policy=auto", "router.routing.local_prefill_tokens=1000") as router:
        output = router.answer(" two")
        (choice,) = completed(router, echo=True, logprobs=1)
        check_echo(router, choice, tuple(router.tokenizer.encode(PROMPT)), len(output) - 1, 1)
        (submit,) = router.stage.last.submits[Role.DECODE]
        assert (submit.local, submit.prompt_logprobs) == (True, 1)


def bad(kind: str, submit: pb.Submit) -> list[pb.PromptLogprobs]:
    told = scores(submit)
    if kind == "short":
        del told.logprob[-1]
    elif kind == "torn":
        del told.top_token[-1]
    elif kind == "no number":
        told.logprob[3] = float("nan")
    elif kind == "of another row":
        told.row = 1
    return [] if kind == "none" else [told]


@pytest.mark.parametrize("kind", ["none", "short", "torn", "no number", "of another row"])
def test_a_prompt_without_its_logprobs_is_asked_for_again(router: Front, kind: str) -> None:
    """It is the replica's failure: nothing of it is shown."""
    tokens = router.answer(" two three", hold_at=0)
    asked = Later(completed, router, stream=True, echo=True, logprobs=2)
    seen = router.held()
    (submit,) = seen.submits[Role.PREFILL]
    step = pb.StepReport(handle=[submit.handle], attempt=[0], choice=[0], index=[0], token=[tokens[0]],
                         finish=[pb.FINISH_REASON_UNSPECIFIED], prompt_logprobs=bad(kind, submit),
                         logprobs=[pb.Logprobs(logprob=-9.0, top_token=[1, 2], top_logprob=[-1.0, -2.0])])
    router.stage.do(lambda: router.workers[Role.PREFILL].say(pb.WorkerMessage(step=step)))
    router.stage.until(lambda: len(seen.submits[Role.PREFILL]) == 2, "it is resumed")
    assert seen.cancels[Role.PREFILL] == [0]
    router.stage.release(seen)
    check_echo(router, asked.result()[0], tuple(router.tokenizer.encode(PROMPT)), len(tokens) - 1, 2)


@pytest.mark.parametrize(("path", "fields", "param"), [
    (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs"), (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt_logprobs": True}, "prompt_logprobs"), (COMPLETIONS, {"echo": 1}, "echo"),
    (COMPLETIONS, {"echo": True, "logprobs": 6}, "logprobs"), (COMPLETIONS, {"max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 0, "min_tokens": 1}, "min_tokens"), (CHAT, {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": [5] * 301, "prompt_logprobs": 19}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": [5] * 301, "echo": True, "logprobs": 4, "n": 4}, "echo")], ids=str)
def test_refused(router: Front, path: str, fields: dict[str, Any], param: str) -> None:
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    refused(router.post(path, {"model": MODEL, **prompt, **fields}), param=param)


def test_as_many_as_are_allowed(router: Front) -> None:
    router.answer("x")
    (choice,) = completed(router, prompt=[5] * 300, prompt_logprobs=19, max_tokens=0)
    assert len(choice["prompt_logprobs"]) == 300
    router.answer("x")
    answer = router.chat("word " * 100, n=4, prompt_logprobs=19, max_tokens=1)
    assert answer.status_code == 200, "a chat's answer has them once"


def test_grpc_and_the_sdk(router: Front) -> None:
    ids = [5 + i % 400 for i in range(600)]  # several messages
    with Client(router.grpc) as client:
        router.answer(" two")
        answer = client.generate(GenerateRequest(ids, prompt_logprobs=2, stop=Stop(max_tokens=0)))
        assert (answer.text, answer.usage.completion_tokens) == ("", 0)
        assert [one.token for one in answer.prompt_logprobs] == ids[1:]
        assert [(one.logprob, one.rank) for one in answer.prompt_logprobs] == [(-i / 4, i) for i in range(1, 600)]
        others = [(top.token, top.logprob) for top in answer.prompt_logprobs[9].top]
        assert others == [(ids[10] + 1, -1.25), (ids[10] + 2, -2.25)]
        assert answer.prompt_logprobs[3].text == router.tokenizer.token_bytes(ids[4])
        router.answer(" two")
        answer = client.chat(ChatRequest([user("hello")], prompt_logprobs=0, logprobs=1))
        assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens - 1
        assert {(one.top, one.rank > 0) for one in answer.prompt_logprobs} == {((), True)}
        assert {one.rank for one in answer.choices[0].logprobs} == {0}
        router.answer(" two")
        assert not client.generate(GenerateRequest("x")).prompt_logprobs
        with pytest.raises(InvalidRequestError) as caught:
            client.generate(GenerateRequest("x", prompt_logprobs=21))
    assert caught.value.violations[0].field == "prompt_logprobs"
