"""The official client in front of a real router: chat, text, streams, several choices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from slipstream.types import Role
from tests.support.scripted_router import EOS, MODEL, Front, front


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("router")) as one:
        yield one


def test_the_official_client(router: Front) -> None:
    with openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        router.answer("one two")
        whole = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], seed=1, stop=["zz"], n=1, logprobs=False
        )
        assert whole.choices[0].message.content == "one two"
        router.answer("one two")
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "one two"
        assert chunks[-1].usage is not None
        router.answer("three")
        assert client.completions.create(model=MODEL, prompt="x").choices[0].text == "three"
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="none", messages=[{"role": "user", "content": "x"}])
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], n=17)
        assert refused.value.param == "n"


def test_three_choices(router: Front) -> None:
    """By the official client: whole, streamed, as chat and as text; each choice has its own text, stop, end and logprobs."""
    texts = ["one two", "three STOP four", "five six seven"]
    others = tuple((*router.tokenizer.encode(text), EOS) for text in texts[1:])
    with openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0) as client:
        def plan() -> dict[str, Any]:
            router.answer(texts[0], others=others)
            return {"model": MODEL, "n": 3, "stop": [" STOP"]}

        message: Any = [{"role": "user", "content": "x"}]
        whole = client.chat.completions.create(**plan(), messages=message, logprobs=True)
        right = ["one two", "three", "five six seven"]
        assert [(choice.index, choice.message.content, choice.finish_reason) for choice in whole.choices] == [
            (number, text, "stop") for number, text in enumerate(right)]
        for choice, text in zip(whole.choices, right, strict=True):
            assert choice.logprobs is not None
            assert "".join(one.token for one in choice.logprobs.content or ()) == text
        found, roles, ends = ["", "", ""], [0, 0, 0], [0, 0, 0]
        chunks = list(client.chat.completions.create(**plan(), messages=message, stream=True,
                                                     stream_options={"include_usage": True}))
        for chunk in chunks:
            for one in chunk.choices:
                assert not ends[one.index], "nothing follows the end of a choice"
                found[one.index] += one.delta.content or ""
                roles[one.index] += one.delta.role is not None
                ends[one.index] += one.finish_reason is not None
        assert (found, roles, ends) == (right, [1, 1, 1], [1, 1, 1])
        assert whole.usage is not None
        prompt = len(router.stage.last.submits[Role.PREFILL][0].tokens)
        assert whole.usage.prompt_tokens == prompt == whole.usage.total_tokens - whole.usage.completion_tokens, "counted once"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.model_dump() == whole.usage.model_dump()
        assert [one.text for one in client.completions.create(**plan(), prompt="x").choices] == right
        submit = router.stage.last.submits[Role.PREFILL][0]
        assert list(submit.choices) == [0, 1, 2]
        assert len(router.stage.last.submits[Role.DECODE]) == 1, "one transfer for all"


def test_priority_and_salt_reach_both_legs(router: Front) -> None:
    router.answer("fine")
    assert router.chat(priority=-7, cache_salt="tenant").status_code == 200
    for (submit,) in router.stage.last.submits.values():
        assert (submit.priority, submit.cache_salt) == (-7, "tenant")
