"""Structured output: what a matcher allows, and where a text of a form ends."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from slipstream import checkpoint
from slipstream.checkpoint import DEMO
from slipstream.engine import sampler
from slipstream.errors import InternalError, InvalidRequestError
from slipstream.text import grammar
from slipstream.text.grammar import Grammars, Matcher
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import Grammar, SamplingParams

CHECKPOINT = checkpoint.read(DEMO)
TOKENIZER = Tokenizer(DEMO)
EOS = min(CHECKPOINT.eos_token_ids)
GRAMMARS = Grammars(DEMO, CHECKPOINT.vocab_size, CHECKPOINT.eos_token_ids)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def matcher(text: str, **thinking: Any) -> Matcher:
    return GRAMMARS.matcher(Grammar(text=text, **thinking))


def tokens_of(mask: bytes) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist())


def take(one: Matcher, text: str) -> bool:
    """Whether all of the text was allowed, token by token."""
    for token in TOKENIZER.encode(text):
        if token not in tokens_of(one.allowed()):
            return False
        one.accept(token)
    return True


@pytest.mark.parametrize(("text", "fits"), [
    ('{"a": 12}', True), ('{"a":-3}', True), ('{\n  "a": 12\n}', True), ('{"a": "12"}', False), ('{"b": 1}', False),
    ("[1]", False), ('{"a": 1.5}', False), ("Sure: {", False),
])
def test_a_schema(text: str, fits: bool) -> None:
    one = matcher(grammar.json_schema(SCHEMA))
    assert take(one, text) == fits
    assert one.over == fits, "after its last brace nothing can follow, and not before"


def test_the_end_is_known_with_the_last_token() -> None:
    one = matcher(grammar.json_schema(SCHEMA))
    *first, last = TOKENIZER.encode('{"a": 12}')
    for token in first:
        assert not one.ends_with(token)
        one.accept(token)
    before = one.allowed()
    assert one.ends_with(last)
    assert one.allowed() == before, "asking changes nothing"


def test_a_copy_goes_ways_of_its_own() -> None:
    one = matcher(grammar.json_object())
    assert take(one, '{"x": ')
    other = one.copy()
    assert take(one, "1}")
    assert take(other, '"y"}')


def test_masks_along_drafts_are_those_after_them() -> None:
    text = TOKENIZER.encode('{"a": 12}')
    for start in range(len(text)):
        one = matcher(grammar.json_schema(SCHEMA))
        for token in text[:start]:
            one.accept(token)
        drafts, after, expected = text[start:], one.copy(), [one.allowed()]
        for token in drafts[:-1]:
            after.accept(token)
            expected.append(after.allowed())
        assert one.allowed_along(drafts) == expected, "nothing follows the last brace"
        wrong = next(token for token in range(CHECKPOINT.vocab_size) if token not in tokens_of(expected[-1]))
        assert one.allowed_along([*drafts[:-1], wrong, *drafts]) == expected, "nor what is not allowed"
        assert one.allowed() == expected[0], "asking changes nothing"


def test_white_space_has_an_end() -> None:
    assert take(matcher(grammar.json_object()), "{" + " " * 30 + '"a": 1}')
    assert not take(matcher(grammar.json_object()), "{" + "\n" * 40)


def test_an_empty_schema_is_any_object() -> None:
    assert take(matcher(grammar.json_schema({})), '{"a": [1, null, "x"]}')
    assert not take(matcher(grammar.json_schema({})), "1")


@pytest.mark.parametrize("schema", [
    {"type": "obj"}, {"type": "string", "pattern": "(?=x)"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("},
    {"type": "object", "properties": {"a": 1}}, {"type": "object", "required": "a"},
])
def test_what_cannot_be_compiled(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="form of the answer"):
        matcher(grammar.json_schema(schema))
    assert take(matcher(grammar.json_object()), '{"a": 1}'), "and the next one can"


def test_a_token_that_is_not_allowed() -> None:
    with pytest.raises(InternalError, match="does not go on"):
        matcher(grammar.json_object()).accept(TOKENIZER.encode("x")[0])


def test_thinking_is_free_and_cannot_end_the_answer() -> None:
    [begin], [end] = TOKENIZER.encode("{"), TOKENIZER.encode("!")  # stand for <think> and </think>
    one = matcher(grammar.json_schema(SCHEMA), think_end=end, thinks=True)
    assert tokens_of(one.allowed()) >= set(range(CHECKPOINT.vocab_size)) - CHECKPOINT.eos_token_ids
    assert not tokens_of(one.allowed()) & CHECKPOINT.eos_token_ids
    assert take(one, "hm, } or")
    assert not one.over
    one.accept(end)
    assert take(one, '{"a": 1}')
    assert one.over

    one = matcher(LLMatcher.grammar_from_lark('start: "[" /[0-9]/ "]"'), think_start=begin, think_end=end)
    assert begin in tokens_of(one.allowed())
    straight = one.copy()
    assert take(straight, "[1]"), "it need not think"
    assert take(one, "{ what?")
    one.accept(end)
    assert begin not in tokens_of(one.allowed()), "it thinks once"
    assert take(one, "[1]")


def test_the_sampler_draws_what_is_allowed() -> None:
    logits = torch.randn(3, CHECKPOINT.vocab_size, generator=torch.Generator().manual_seed(0))
    mask = matcher(grammar.json_object()).allowed()
    draws = [sampler.Draw(params=SamplingParams(temperature=temperature, seed=seed), choice=0, index=0, allowed=mask)
             for temperature, seed in ((0.0, 1), (5.0, 2), (5.0, 3))]
    tokens = sampler.sample(logits, draws)
    assert set(tokens) <= tokens_of(mask)
    assert tokens[0] == max(tokens_of(mask), key=lambda token: float(logits[0, token]))


def test_random_tokens_make_json_of_the_schema() -> None:
    """A model that knows nothing still writes what the schema says."""
    schema = {"type": "object", "required": ["name", "tags"], "additionalProperties": False, "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "maxItems": 3, "items": {"enum": ["x", "y", 3]}}}}
    for seed in range(20):
        rng, one, text = np.random.default_rng(seed), matcher(grammar.json_schema(schema)), list[int]()
        while not one.over:
            token = int(rng.choice(sorted(tokens_of(one.allowed()))))
            one.accept(token)
            text.append(token)
            assert len(text) < 2000
        value = json.loads(TOKENIZER.decode(text))
        assert set(value) == {"name", "tags"}
        assert len(value["name"]) <= 12
        assert len(value["tags"]) <= 3
        assert set(value["tags"]) <= {"x", "y", 3}
