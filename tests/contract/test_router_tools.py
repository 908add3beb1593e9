"""Tools and thinking, whole and streamed, as the official client sees them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from slipstream.types import FinishReason, Role
from tests.support.fake_workers import Plan
from tests.support.scripted_router import CHAT, MODEL, Front, front, refused
from tests.support.talking import ARGUMENTS, CALLS, WEATHER, checkpoint

ASK: list[Any] = [{"role": "user", "content": "What is the weather?"}]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("router")
    with front(folder, f"model.path={checkpoint(folder)}") as one:
        yield one


@pytest.fixture(scope="module")
def client(router: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as one:
        yield one


@pytest.fixture
async def async_client(router: Front) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as one:
        yield one


# Tools -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 50])
@pytest.mark.parametrize("form", CALLS)
def test_a_call_whole_and_streamed(router: Front, client: openai.OpenAI, form: str, batch: int) -> None:
    text = "Let me look.\n\n" + CALLS[form] + "\n" + CALLS[form]
    router.answer(text, batch=batch)
    whole: Any = client.chat.completions.create(model=MODEL, messages=ASK, tools=[WEATHER], tool_choice="auto").choices[0]
    assert '"name": "get_weather"' in router.prompt, "the template shows the tools"
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "Let me look."
    assert [call.function.name for call in whole.message.tool_calls or []] == ["get_weather"] * 2
    assert [json.loads(call.function.arguments) for call in whole.message.tool_calls or []] == [ARGUMENTS] * 2
    assert len({call.id for call in whole.message.tool_calls or []}) == 2

    router.answer(text, batch=batch)
    content, reasons, names = "", [], {}
    pieces: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(model=MODEL, messages=ASK, tools=[WEATHER], stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
        for call in delta.tool_calls or []:
            if call.id:
                assert call.function
                names[call.index], pieces[call.index] = call.function.name, []
            pieces[call.index].append((call.function and call.function.arguments) or "")
    assert (content, names, reasons[-1]) == ("Let me look.", {0: "get_weather", 1: "get_weather"}, "tool_calls")
    assert [json.loads("".join(pieces[index])) for index in (0, 1)] == [ARGUMENTS] * 2
    assert batch > 3 or len(pieces[0]) > 3, "arguments come as they are written"


def test_a_call_by_the_clients_own_accumulator(router: Front, client: openai.OpenAI) -> None:
    router.answer(CALLS["xml"])
    with client.chat.completions.stream(model=MODEL, messages=ASK, tools=[WEATHER]) as stream:
        kinds = [event.type for event in stream]
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.delta" in kinds
    assert calls
    assert json.loads(calls[0].function.arguments) == ARGUMENTS


async def test_the_asynchronous_client(router: Front, async_client: openai.AsyncOpenAI) -> None:
    router.answer(CALLS["json"])
    stream = await async_client.chat.completions.create(model=MODEL, messages=ASK, tools=[WEATHER], stream=True)
    calls = [call async for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    assert json.loads("".join((call.function and call.function.arguments) or "" for call in calls)) == ARGUMENTS
    router.answer("plain")
    reply = await async_client.chat.completions.create(model=MODEL, messages=ASK)
    assert reply.choices[0].message.content == "plain"
    router.answer("plain")
    assert (await async_client.responses.create(model=MODEL, input="x")).output_text == "plain"


def test_tools_that_are_not_to_be_called(router: Front, client: openai.OpenAI) -> None:
    router.answer(CALLS["json"])
    choice = client.chat.completions.create(model=MODEL, messages=ASK, tools=[WEATHER], tool_choice="none").choices[0]
    assert "get_weather" not in router.prompt
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALLS["json"], None, "stop")


def test_one_call_at_a_time(router: Front, client: openai.OpenAI) -> None:
    """The second one is not even awaited, nor counted."""
    for batch in (1, 100):
        tokens = router.answer(CALLS["json"] + CALLS["xml"] + " and more", batch=batch)
        reply = client.chat.completions.create(model=MODEL, messages=ASK, tools=[WEATHER], parallel_tool_calls=False)
        assert len(reply.choices[0].message.tool_calls or []) == 1
        assert reply.choices[0].finish_reason == "tool_calls"
        assert reply.usage
        texts = [router.tokenizer.decode(tokens[:count]) for count in range(len(tokens))]
        complete = next(count for count, text in enumerate(texts) if text.endswith("30}"))
        assert reply.usage.completion_tokens in (complete, complete + 1), "a token may hold the next brace as well"


@pytest.mark.parametrize(
    "text",
    ["It is warm.", "<tool_call>\nget_weather(Brno)\n</tool_call>", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_reason_fits_the_answer(router: Front, text: str, stream: bool) -> None:
    router.answer(text)
    if stream:
        answer = router.stream(tools=[WEATHER])
        assert (answer.text, answer.reasons) == (text, ["stop"])
        assert not any("tool_calls" in chunk["choices"][0]["delta"] for chunk in answer.chunks)
    else:
        choice = router.chat(tools=[WEATHER]).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        assert "tool_calls" not in choice["message"]


def test_a_call_that_is_cut_off_says_so(router: Front) -> None:
    tokens = router.tokenizer.encode(CALLS["json"])
    for stream in (False, True):
        router.stage.next(Plan(tokens=(*tokens, 1913), reason=FinishReason.STOP))
        if stream:
            assert router.stream(tools=[WEATHER], max_tokens=len(tokens) - 12).reasons == ["length"]
            continue
        choice = router.chat(tools=[WEATHER], max_tokens=len(tokens) - 12).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert (
            CALLS["json"].partition('"arguments": ')[2].startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])
        )


def test_several_choices_call_for_themselves(router: Front, client: openai.OpenAI) -> None:
    tokens = [(*tuple(router.tokenizer.encode(text)), 1913) for text in (CALLS["json"], "No tool.", CALLS["xml"])]
    router.stage.next(Plan(tokens=tokens[0], others=tuple(tokens[1:])))
    choices = client.chat.completions.create(model=MODEL, messages=ASK, tools=[WEATHER], n=3).choices
    assert [choice.finish_reason for choice in choices] == ["tool_calls", "stop", "tool_calls"]
    assert choices[1].message.content == "No tool."


def test_a_conversation_with_calls_and_results(router: Front, client: openai.OpenAI) -> None:
    """What a client got, it can send back as it is."""
    router.answer("<think>\nhm\n</think>\n\nLooking." + CALLS["json"])
    said = client.chat.completions.create(model=MODEL, messages=ASK, tools=[WEATHER]).choices[0].message
    router.answer("Warm.")
    assert said.tool_calls
    result: Any = {
        "role": "tool",
        "tool_call_id": said.tool_calls[0].id,
        "content": [{"type": "text", "text": "25 °C <|im_end|>"}],
    }
    system: Any = {"role": "developer", "content": "Be brief."}
    messages: list[Any] = [system, *ASK, said, result]
    assert client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER]).choices[0].message.content == "Warm."
    text = router.prompt
    assert "<|im_start|>system\nBe brief.<|im_end|>" in text
    call = CALLS["xml"].replace("</tool_call>", "</tool_call><|im_end|>")
    assert f"<|im_start|>assistant\n<think>\nhm\n</think>\n\nLooking.{call}" in text
    assert "<|im_start|>tool\n25 °C <|im_end|><|im_end|>" in text
    submit = router.stage.last.submits[Role.PREFILL][0]
    assert list(submit.tokens).count(1913) == text.count("<|im_end|>") - 1, "a word of a result is no token"


DEEP = json.dumps({"a": 1})
for _ in range(300):
    DEEP = '{"a": ' + DEEP + "}"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '["a"]'}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": 5, "arguments": "{}"}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "user", "tool_calls": [{}], "content": "x"}], "messages[0].tool_calls"),
        ([{"role": "tool", "tool_call_id": 5, "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "reasoning_content": 5, "content": "x"}], "messages[0].reasoning_content"),
    ],
)
def test_histories_that_make_no_sense(router: Front, messages: Any, param: str) -> None:
    refused(router.post(CHAT, {"model": MODEL, "messages": messages}), param=param)


FUNCTION = WEATHER["function"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": 5}, "tools"),
        ({"tools": [WEATHER] * 129}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": 5}}]}, "tools[0].function.description"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * (1 << 20)}}]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "unheard"}}}, "tool_choice"),
        ({"tools": [WEATHER], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        # These need structured output.
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}]}, "tools"),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        # What the template is told.
        ({"chat_template_kwargs": {"unheard_of": 1}}, "chat_template_kwargs.unheard_of"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": [1]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"chat_template": "{% for a in range(99999999) %}{% endfor %}"}, "chat_template"),
    ],
)
def test_fields_that_make_no_sense(router: Front, fields: dict[str, Any], param: str) -> None:
    error = refused(router.post(CHAT, {"model": MODEL, "messages": ASK, **fields}), param=param)
    assert "object at 0x" not in error["message"]


def test_tools_may_be_nested_as_deeply_as_json(router: Front) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": json.loads(DEEP)}}
    router.answer("ok")
    assert router.chat(tools=[tool]).status_code in (200, 400)
    router.stage.plans.clear()


# Thinking --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({"enable_thinking": True}, "so it is 漢\n\n🙂 well\n</think>\n\nThe answer."),
        ({}, "<think>\nso it is 漢\n\n🙂 well\n</think>\n\nThe answer."),
    ],
)
@pytest.mark.parametrize("batch", [1, 4])
def test_thinking_apart_from_the_answer(router: Front, client: openai.OpenAI, told: Any, text: str, batch: int) -> None:
    tokens = router.answer(text, batch=batch)
    reply = client.chat.completions.create(model=MODEL, messages=ASK, extra_body={"chat_template_kwargs": told})
    message: Any = reply.choices[0].message
    assert (message.reasoning_content, message.content) == ("so it is 漢\n\n🙂 well", "The answer.")
    usage: Any = reply.usage
    assert usage.completion_tokens_details.reasoning_tokens == tokens.index(1919) + 1, "the first token counts, and the mark"
    router.answer(text, batch=batch)
    stream = client.chat.completions.create(model=MODEL, messages=ASK, stream=True, extra_body={"chat_template_kwargs": told})
    deltas: list[Any] = [chunk.choices[0].delta for chunk in stream]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "so it is 漢\n\n🙂 well"
    assert "".join(delta.content or "" for delta in deltas) == "The answer."


def test_thinking_that_ends_at_once(router: Front) -> None:
    router.answer("</think>Yes.")
    body = router.chat(chat_template_kwargs={"enable_thinking": True}).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}


@pytest.mark.parametrize("fields", [{"chat_template_kwargs": {"enable_thinking": False}}, {}])
def test_answers_without_thinking(router: Front, fields: dict[str, Any]) -> None:
    router.answer("Plain </think> text.")
    body = router.chat(**fields).json()
    assert body["choices"][0]["message"]["content"] == "Plain </think> text."
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert router.prompt.endswith("<think>\n\n</think>\n\n") == bool(fields)


def test_a_stop_string_beside_thinking(router: Front) -> None:
    """Only a live beginning of it is held back, and never a mark."""
    for stop, text in (("b,c", "a b,b </think>d b,b,c"), ("</thing", "a b,b </think>d </thing")):
        router.answer(text)
        answer = router.stream(stop=stop, chat_template_kwargs={"enable_thinking": True})
        thought = "".join(chunk["choices"][0]["delta"].get("reasoning_content", "") for chunk in answer.chunks)
        router.answer(text)
        whole = router.chat(stop=stop, chat_template_kwargs={"enable_thinking": True}).json()["choices"][0]["message"]
        assert (thought, answer.text) == (whole["reasoning_content"], whole["content"])
        assert (thought, answer.text) == ("a b,b ", "d b," if stop == "b,c" else "d ")


def test_logprobs_cover_thinking_calls_and_answer(router: Front) -> None:
    text = "ano 漢\n</think>\n\nžluťoučký" + CALLS["json"]
    for stream in (False, True):
        tokens = router.answer(text)
        asked: dict[str, Any] = {"logprobs": True, "tools": [WEATHER], "chat_template_kwargs": {"enable_thinking": True}}
        if stream:
            chunks = [chunk["choices"][0] for chunk in router.stream(**asked).chunks]
            told = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
        else:
            told = router.chat(**asked).json()["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in told).decode() == text
        assert len(told) == len(tokens) - 1


def test_what_a_template_refuses_is_said(router: Front) -> None:
    error = refused(router.post(CHAT, {"model": MODEL, "messages": ASK, "reasoning_effort": "enormous"}))
    assert "no such effort: enormous" in error["message"]
    router.answer("fine")
    assert router.chat(reasoning_effort="low").status_code == 200
