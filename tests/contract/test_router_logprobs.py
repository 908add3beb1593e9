"""Logprobs and sampling fields through a real router and scripted workers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from slipstream.checkpoint import DEMO
from slipstream.types import Role
from slipstream.v1 import worker_pb2 as pb
from tests.support.scripted_router import EOS, MODEL, Front, Later, front


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("logprobs")) as one:
        yield one


def told(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_cover_the_text(router: Front, stream: bool) -> None:
    text = "Grüße, 世界 🙂!"
    tokens = router.answer(text)
    if stream:
        chunks = router.stream(logprobs=True, top_logprobs=2, temperature=0).chunks
        entries = told([choice for chunk in chunks for choice in chunk["choices"]])
    else:
        entries = told(router.chat(logprobs=True, top_logprobs=2).json()["choices"])
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text
    assert [entry["logprob"] for entry in entries] == [-i - 1 for i in range(len(tokens) - 1)], "none of the end token"
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_cut_off_by_a_stop_string_are_not_shown(router: Front, stream: bool) -> None:
    router.answer("one two three four five")
    if stream:
        chunks = router.stream(logprobs=True, stop=["three"]).chunks
        entries = told([choice for chunk in chunks for choice in chunk["choices"]])
    else:
        entries = told(router.chat(logprobs=True, stop=["three"]).json()["choices"])
    shown = "".join(entry["token"] for entry in entries)
    assert entries
    assert shown.startswith("one two"[: len(shown)])
    assert "four" not in shown
    assert "one two" in shown
    assert all(entry["top_logprobs"] == [] for entry in entries)


def test_text_logprobs(router: Front) -> None:
    router.answer("one two")
    choice = router.post("/v1/completions", {"model": MODEL, "prompt": "x", "logprobs": 2}).json()["choices"][0]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"] == "one two"
    assert found["text_offset"] == [sum(map(len, found["tokens"][:i])) for i in range(len(found["tokens"]))]
    assert found["token_logprobs"] == [-i - 1 for i in range(len(found["tokens"]))]
    assert all(name in top for name, top in zip(found["tokens"], found["top_logprobs"], strict=True))


def test_the_official_client_and_what_the_workers_get(router: Front) -> None:
    with openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0) as client:
        router.answer("one two")
        reply = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], seed=9, logprobs=True, top_logprobs=20,
            presence_penalty=0.5, frequency_penalty=-0.25, logit_bias={"7": 2, "3": -100},
            extra_body={"top_k": 5, "min_p": 0.125, "repetition_penalty": 1.5, "min_tokens": 2, "stop_token_ids": [77]})
        assert reply.choices[0].logprobs is not None
        assert reply.choices[0].logprobs.content
    submits = [router.stage.last.submits[role][0] for role in Role]
    assert submits[0].sampling == submits[1].sampling
    sampling = submits[0].sampling
    assert (sampling.top_k, sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (5, 0.125, 0.5, -0.25)
    assert (sampling.repetition_penalty, sampling.logprobs, sampling.seed, submits[1].min_tokens) == (1.5, 20, 9, 2)
    assert (list(sampling.biased_token), list(sampling.bias)) == ([3, 7], [-100.0, 2.0])


def test_the_checkpoint_says_how_to_sample_where_the_request_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in DEMO.glob("*.json*"):
        (folder / file.name).write_bytes(file.read_bytes())
    told = {"temperature": 0.5, "top_p": 0.75, "top_k": 20, "min_p": 0.25, "repetition_penalty": 1.5}
    off = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    (folder / "generation_config.json").write_text(json.dumps({**told, "eos_token_id": EOS}))
    with front(tmp_path, f"model.path={folder}") as router:
        for asked, right in (({}, told), (off, off), ({"top_k": -1, "top_p": None}, {**told, "top_k": 0})):
            router.answer("fine")
            assert router.chat(**asked).status_code == 200
            for (submit,) in router.stage.last.submits.values():
                assert {name: getattr(submit.sampling, name) for name in told} == right


@pytest.mark.parametrize("fields", [
    {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": 3}, {"min_tokens": 5, "max_tokens": 4},
    {"logit_bias": {"999999": 1}}, {"logit_bias": {"-1": 1}}, {"logit_bias": {"1": True}}], ids=str)
def test_refused(router: Front, fields: dict[str, Any]) -> None:
    assert router.chat(**fields).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_no_probability_is_shown_as_a_floor(router: Front, stream: bool) -> None:
    """JSON has no infinity."""
    tokens = router.answer("one two", hold_at=0)
    asked = Later(router.stream if stream else router.chat, logprobs=True, top_logprobs=2)
    seen = router.held()
    step = pb.StepReport(handle=[seen.submits[Role.PREFILL][0].handle], attempt=[0], choice=[0], index=[0], token=[tokens[0]],
                         finish=[pb.FINISH_REASON_UNSPECIFIED],
                         logprobs=[pb.Logprobs(logprob=-math.inf, top_token=[1, 2], top_logprob=[0.0, -math.inf])])
    router.stage.do(lambda: router.workers[Role.PREFILL].say(pb.WorkerMessage(step=step)))
    router.stage.release(seen)
    answer = asked.result()
    choices = [choice for chunk in answer.chunks for choice in chunk["choices"]] if stream else answer.json()["choices"]
    first, *others = told(choices)
    assert (first["logprob"], [top["logprob"] for top in first["top_logprobs"]]) == (-9999.0, [0.0, -9999.0])
    assert len(others) == len(tokens) - 2


BAD = {"none": [], "torn": [pb.Logprobs(logprob=-1.0, top_token=[1, 2], top_logprob=[-1.0])],
       "too few": [pb.Logprobs(logprob=-1.0, top_token=[1], top_logprob=[-1.0])],
       "no number": [pb.Logprobs(logprob=math.nan, top_token=[1, 2], top_logprob=[-1.0, -2.0])]}


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("kind", list(BAD))
def test_a_token_without_its_logprobs_is_asked_for_again(router: Front, role: Role, kind: str) -> None:
    """It is the replica's failure: its leg is cancelled, and nothing of it is shown."""
    index = 0 if role is Role.PREFILL else 2
    tokens = router.answer("one two three four", hold_at=index)
    asked = Later(router.stream, logprobs=True, top_logprobs=2)
    seen = router.held()
    handle = seen.submits[role][0].handle
    step = pb.StepReport(handle=[handle], attempt=[0], choice=[0], index=[index], token=[tokens[0]],
                         finish=[pb.FINISH_REASON_UNSPECIFIED], logprobs=BAD[kind])
    router.stage.do(lambda: router.workers[role].say(pb.WorkerMessage(step=step)))
    router.stage.until(lambda: len(seen.submits[role]) == 2, "it is resumed")
    assert seen.cancels[role] == [0]
    router.stage.release(seen)
    answer = asked.result()
    assert (answer.text, answer.errors) == ("one two three four", [])
    entries = told([choice for chunk in answer.chunks for choice in chunk["choices"]])
    assert [entry["logprob"] for entry in entries] == [-i - 1 for i in range(len(tokens) - 1)]
