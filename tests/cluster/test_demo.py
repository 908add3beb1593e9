"""`slipstream demo`: a whole deployment on Ray, three right answers, and nothing left."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from launch.demo import questions
from tests.support.command import Command

pytestmark = pytest.mark.deployment


@pytest.fixture
def command() -> Iterator[Command]:
    made = Command(["demo"])
    yield made
    made.clean_up()


@pytest.mark.timeout(200)
def test_the_demo_answers_and_leaves_nothing(command: Command) -> None:
    assert command.wait(180) == 0, command.text
    text = command.text
    for question in questions():
        assert f"answered  {question.answer}\n" in text
    assert "3 of 3 answers are right" in text
    assert len(re.findall(r"TTFT \d+ ms.*moved [\d.]+ .iB of KV and [\d.]+ .iB of state", text)) == 3
    assert {match.split("-")[0] for match in re.findall(r"(\S+) serves at", text)} == {"prefill", "decode", "router"}
    assert command.leftovers() == []
