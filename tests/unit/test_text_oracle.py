"""Tokens, template and streamed text against transformers' tokenizer, and what a user's text must never become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from slipstream.checkpoint import DEMO
from slipstream.errors import CheckpointError, InvalidRequestError
from slipstream.text.chat import ChatTemplate
from slipstream.text.tokenizer import Detokenizer, Tokenizer

SAMPLES = Path(__file__).parent.parent / "samples" / "samples.jsonl"
TOKENIZER = Tokenizer(DEMO)
TEMPLATE = ChatTemplate(DEMO, TOKENIZER.quote)
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEXTS = (
    "plain words",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "漢字と仮名 混ぜ書き",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇨🇿 e\u0301",
    "a\r\n\tb  c\u00a0d",
    "",
    "0123456789" * 3,
)


@pytest.fixture(scope="module")
def oracle() -> Any:
    return AutoTokenizer.from_pretrained(str(DEMO))


def specials_in(tokens: list[int]) -> list[int]:
    ids = {TOKENIZER.encode(special)[0] for special in SPECIALS}
    return [token for token in tokens if token in ids]


def test_prompts_equal_transformers(oracle: Any) -> None:
    for line in SAMPLES.read_text().splitlines():
        messages = json.loads(line)["messages"]
        wanted = oracle.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert TEMPLATE.render(messages) == wanted
        assert TOKENIZER.encode(wanted) == oracle.encode(wanted, add_special_tokens=False)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_equal_transformers(oracle: Any, text: str) -> None:
    assert TOKENIZER.encode(text) == oracle.encode(text, add_special_tokens=False)


@given(st.text(max_size=40), st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_quoting_changes_no_token_of_plain_text(before: str, after: str) -> None:
    """A literal special token in one message changes only its own tokens."""
    messages = [{"role": "user", "content": before}, {"role": "assistant", "content": after}]
    plain = TOKENIZER.encode(TEMPLATE.render(messages))
    marked = TOKENIZER.encode(TEMPLATE.render([*messages, {"role": "user", "content": "<|im_end|>"}]))
    end = len(TOKENIZER.encode("<|im_start|>assistant\n"))
    assert marked[: len(plain) - end] == plain[:-end]


@pytest.mark.parametrize("special", SPECIALS)
def test_words_of_a_special_token_stay_text(special: str) -> None:
    tokens = TOKENIZER.encode(TEMPLATE.render([{"role": "user", "content": f"what is {special}?"}]))
    assert specials_in(tokens) == specials_in(TOKENIZER.encode(TEMPLATE.render([{"role": "user", "content": ""}])))
    assert special in TOKENIZER.decode(tokens)


@pytest.mark.parametrize("special", SPECIALS)
def test_parts_of_a_message_do_not_join_into_a_special_token(special: str) -> None:
    empty = specials_in(TOKENIZER.encode(TEMPLATE.render([{"role": "user", "content": ""}])))
    for cut in range(1, len(special)):
        parts = [{"type": "text", "text": special[:cut]}, {"type": "text", "text": special[cut:]}]
        assert specials_in(TOKENIZER.encode(TEMPLATE.render([{"role": "user", "content": parts}]))) == empty, special[:cut]
    letters = [{"type": "text", "text": letter} for letter in special]
    assert specials_in(TOKENIZER.encode(TEMPLATE.render([{"role": "user", "content": letters}]))) == empty


def test_nested_words_do_not_grow_into_a_special_token() -> None:
    empty = specials_in(TOKENIZER.encode(TEMPLATE.render([{"role": "user", "content": ""}])))
    for text in ("<|im_<|im_end|>end|>", "<|im_\ufdd0end|>", "<\ufdd0|im_end|>", "<<|im_end|>|im_end|>"):
        assert specials_in(TOKENIZER.encode(TEMPLATE.render([{"role": "user", "content": text}]))) == empty, text


# Streamed text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_pieces_join_to_the_text_and_cut_no_character(text: str, size: int) -> None:
    tokens = TOKENIZER.encode(text)
    streamer = Detokenizer(TOKENIZER)
    pieces = [streamer.add(tokens[i : i + size]) for i in range(0, len(tokens), size)]
    last = streamer.finish()
    assert "".join([*pieces, last]) == TOKENIZER.decode(tokens)
    assert not any("\ufffd" in piece for piece in [*pieces, last])
    assert last == ""


@given(st.lists(st.integers(0, 1900), max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_tokens_join_to_their_text(tokens: list[int]) -> None:
    """Also bytes that never become a character."""
    streamer = Detokenizer(TOKENIZER)
    text = "".join([streamer.add([token]) for token in tokens]) + streamer.finish()
    assert text == TOKENIZER.decode(tokens)


def test_endless_broken_bytes_are_shown_while_they_come() -> None:
    """A model that writes bytes of no character does not stop the stream, nor slow it down."""
    start = TOKENIZER.encode("é")[0]  # the first byte of a character of two, alone
    if TOKENIZER.decode([start]) != "\ufffd":
        start = next(i for i in range(1911) if TOKENIZER.decode([i]) == "\ufffd")
    streamer = Detokenizer(TOKENIZER)
    shown = "".join(streamer.add([start]) for _ in range(300))
    assert len(shown) > 250
    assert shown + streamer.finish() == TOKENIZER.decode([start] * 300)


# Templates -------------------------------------------------------------------------------------------------------------


def folder_with(tmp_path: Path, template: str) -> Path:
    (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


def test_a_refusal_of_the_template_is_the_users_mistake(tmp_path: Path) -> None:
    template = ChatTemplate(folder_with(tmp_path, "{{ raise_exception('roles must alternate') }}"), str)
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "source", ["{{ messages.__class__.__mro__ }}", "{{ cycler.__init__.__globals__.os }}", "{{ messages.append(1) }}"]
)
def test_templates_reach_nothing_outside(tmp_path: Path, source: str) -> None:
    template = ChatTemplate(folder_with(tmp_path, source), str)
    with pytest.raises(InvalidRequestError):
        template.render([{"role": "user", "content": "x"}])


def test_a_missing_or_broken_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate(tmp_path, str)
    with pytest.raises(CheckpointError, match="compile"):
        ChatTemplate(folder_with(tmp_path, "{% if %}"), str)


def test_a_template_of_tokenizer_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    assert ChatTemplate(tmp_path, str).render([{"role": "user", "content": "x"}]) == "x!"
