"""/v1/responses as the official client uses it: text, pictures, tools, thinking, events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from slipstream.types import FinishReason, Role
from slipstream.v1 import worker_pb2 as pb
from tests.support.fake_workers import Plan
from tests.support.scripted_router import MODEL, Front, Later, front, picture, refused
from tests.support.talking import ARGUMENTS, CALLS, WEATHER, checkpoint

PATH = "/v1/responses"
TOOL: Any = {"type": "function", **WEATHER["function"], "strict": False}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("router")
    with front(folder, f"model.path={checkpoint(folder)}", "router.max_resumes=0") as one:
        yield one


@pytest.fixture(scope="module")
def client(router: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_text(router: Front, client: openai.OpenAI) -> None:
    tokens = router.answer("Hello, 北京 🙂.")
    reply = client.responses.create(
        model=MODEL, input="hi", instructions="Be brief.", max_output_tokens=50, temperature=0.5, metadata={"a": "b"}
    )
    assert router.prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (reply.output_text, reply.status, reply.object) == ("Hello, 北京 🙂.", "completed", "response")
    assert [item.type for item in reply.output] == ["message"]
    assert (reply.instructions, reply.max_output_tokens, reply.metadata) == ("Be brief.", 50, {"a": "b"})
    assert (reply.error, reply.incomplete_details, reply.previous_response_id) == (None, None, None)
    submit, usage = router.stage.last.submits[Role.PREFILL][0], reply.usage
    assert (submit.max_tokens, submit.sampling.temperature) == (50, 0.5)
    assert usage
    assert (usage.input_tokens, usage.output_tokens) == (len(submit.tokens), len(tokens))
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == len(submit.tokens) // 2
    assert reply.to_dict()["store"] is False, "nothing is stored"


def test_what_is_cut_off_is_incomplete(router: Front, client: openai.OpenAI) -> None:
    router.stage.next(Plan(tokens=tuple(range(100, 150)), reason=FinishReason.LENGTH))
    reply = client.responses.create(model=MODEL, input="hi", max_output_tokens=5)
    assert reply.status == "incomplete"
    assert reply.incomplete_details
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.output[0].to_dict()["status"] == "incomplete"
    router.stage.next(Plan(tokens=tuple(range(100, 150)), reason=FinishReason.LENGTH))
    events = list(client.responses.create(model=MODEL, input="hi", max_output_tokens=5, stream=True))
    assert events[-1].type == "response.incomplete"


@pytest.mark.parametrize("batch", [1, 4, 100])
def test_the_events_of_thinking_text_and_calls(router: Front, client: openai.OpenAI, batch: int) -> None:
    router.answer("hm\n</think>\n\nLet me look." + CALLS["json"] + CALLS["xml"], batch=batch)
    stream = client.responses.create(
        model=MODEL, input="hi", tools=[TOOL], stream=True, extra_body={"chat_template_kwargs": {"enable_thinking": True}}
    )
    events: list[Any] = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before] == [
        "created",
        "in_progress",
        *(
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
        ),
        *(
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
        ),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done") * 2,
        "completed",
    ]
    final = events[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert all(item.status == "completed" for item in final.output)
    assert final.output_text == "Let me look."
    for index, item in enumerate(final.output):
        of = [event for event in events if getattr(event, "output_index", None) == index]
        assert {event.item_id for event in of if hasattr(event, "item_id")} == {item.id}
        text = "".join(event.delta for event in of if event.type.endswith(".delta"))
        assert text == (item.arguments if item.type == "function_call" else item.content[0].text)
        assert of[-1].item == item
    assert [json.loads(item.arguments) for item in final.output[2:]] == [ARGUMENTS] * 2
    assert len({item.call_id for item in final.output[2:]}) == 2
    assert final.usage.output_tokens_details.reasoning_tokens > 0


def test_by_the_clients_own_accumulator(router: Front, client: openai.OpenAI) -> None:
    router.answer("Looking. " + CALLS["xml"])
    with client.responses.stream(model=MODEL, input="hi", tools=[TOOL]) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final: Any = stream.get_final_response()
    assert snapshots[-1] == "Looking."
    assert json.loads(final.output[1].arguments) == ARGUMENTS


def test_a_conversation_with_calls(router: Front, client: openai.OpenAI) -> None:
    """The output of one response is input of the next, as it is."""
    router.answer("<think>\nhm\n</think>\n\nLooking." + CALLS["json"])
    first: Any = client.responses.create(model=MODEL, input="Weather?", tools=[TOOL])
    router.answer("Warm.")
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "25 °C"}
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}, *first.output, result]
    assert client.responses.create(model=MODEL, input=items, tools=[TOOL]).output_text == "Warm."
    text = router.prompt.partition("</think>")[0][-60:] + router.prompt.partition("</think>")[2]
    assert text == (
        "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n"[-60:]
        + "\n\nLooking."
        + CALLS["xml"]
        + "<|im_end|>\n<|im_start|>tool\n25 °C<|im_end|>\n<|im_start|>assistant\n"
    )


def test_pictures(router: Front, client: openai.OpenAI) -> None:
    router.answer("ok")
    part: Any = {"type": "input_image", "image_url": picture(64, 32)["image_url"]["url"], "detail": "auto"}
    client.responses.create(model=MODEL, input=[{"role": "user", "content": [{"type": "input_text", "text": "see"}, part]}])
    assert len(router.stage.last.submits[Role.PREFILL][0].images) == 1


def test_logprobs(router: Front, client: openai.OpenAI) -> None:
    for stream in (False, True):
        router.answer("Hello.")
        asked: Any = {
            "model": MODEL,
            "input": "x",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "stream": stream,
        }
        reply: Any = client.responses.create(**asked)
        final = list(reply)[-1].response if stream else reply
        told = final.output[0].content[0].logprobs
        assert "".join(one.token for one in told) == "Hello."
        assert all(len(one.top_logprobs) == 2 for one in told)


def test_nothing_is_an_empty_message(router: Front, client: openai.OpenAI) -> None:
    router.answer("")
    reply: Any = client.responses.create(model=MODEL, input="hi")
    assert (reply.output_text, reply.output[0].content[0].text) == ("", "")


def test_a_stream_that_breaks_has_failed(router: Front) -> None:
    router.answer("one two three", decode_error=pb.ERROR_CODE_INTERNAL, error_at=2)
    with router.open(PATH, input="hi") as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-2] == "event: response.failed"
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["message"]
    assert "[DONE]" not in "".join(lines)


def test_a_failure_before_the_first_event_has_a_status(router: Front) -> None:
    router.answer("one", prefill_error=pb.ERROR_CODE_INTERNAL)
    reply = Later(router.post, PATH, {"model": MODEL, "input": "hi", "stream": True}).result()
    assert reply.status_code >= 500
    assert set(reply.json()) == {"error"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"n": 2}, "n"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "input_audio"}]}]},
            "input[1].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
            "input[0].content[0].image_url.url",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]},
            "input[0].tool_calls[0].arguments",
        ),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{**TOOL, "strict": True}]}, "tools"),
        ({"text": 5}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "enormous"}}, "input"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"metadata": 5}, "metadata"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"temperature": 5}, "temperature"),
        ({"model": 5}, "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(router: Front, fields: dict[str, Any], param: str, stream: bool) -> None:
    refused(router.post(PATH, {"model": MODEL, "input": "SECRETWORD", "stream": stream, **fields}), param=param)
    assert not router.stage.plans
