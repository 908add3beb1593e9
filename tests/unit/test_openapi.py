"""The OpenAPI document says what the router takes: its routes, its fields, and bodies that go well."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from router import openai, openapi, responses
from router.app import App
from slipstream.errors import InvalidRequestError
from tests.support.scripted_router import picture
from tests.support.talking import WEATHER

DOCUMENT = openapi.document()
SCHEMAS = DOCUMENT["components"]["schemas"]
USER = {"role": "user", "content": "x"}


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]})


def test_it_lists_every_route() -> None:
    app = App.__new__(App)
    routes = {(path.replace("{name:path}", "{name}"), method.lower()) for path, _, method in app.routes()}
    assert routes == {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("ChatRequest", openai._CHAT | openai._IGNORED),
        ("CompletionRequest", openai._COMMON | openai._IGNORED | {"prompt", "echo"}),
        ("ResponsesRequest", responses._SAME | responses._OWN | responses._IGNORED | responses._NEUTRAL.keys()),
    ],
)
def test_it_lists_every_field(name: str, fields: frozenset[str]) -> None:
    assert SCHEMAS[name]["properties"].keys() == fields


def test_its_schemas_are_schemas() -> None:
    for name in SCHEMAS:
        Draft202012Validator.check_schema(SCHEMAS[name])
        validator(name).is_valid({})  # every reference leads somewhere
    assert json.dumps(DOCUMENT).count('"$ref"') > 10


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [WEATHER], "tool_choice": "auto", "parallel_tool_calls": False},
        {"stop": ["a"], "seed": -5, "logit_bias": {"5": 1}},
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [CALL], "reasoning_content": "x"},
                {"role": "tool", "content": "x"},
            ]
        },
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, picture(32, 32)]}], "n": None},
        {"temperature": 0},
    ],
)
def test_bodies_that_go_well(fields: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [USER], **fields}
    assert not list(validator("ChatRequest").iter_errors(body))
    openai.chat_request(body)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 3},
        {"tools": [{}]},
        {"n": 17},
        {"stop": [""]},
        {"unheard_of": 1},
        {"messages": []},
        {"seed": 1.5},
        {"top_p": 0},
    ],
)
def test_bodies_that_do_not(fields: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [USER], **fields}
    assert list(validator("ChatRequest").iter_errors(body))
    with pytest.raises(InvalidRequestError):
        openai.chat_request(body)
