"""What a client makes of messages: of those of a later router, too."""

from __future__ import annotations

import pytest

from slipstream_client.convert import Collector
from slipstream_client.errors import IncompleteError
from slipstream_client.v1 import inference_pb2 as pb

USAGE = pb.Usage(prompt_tokens=3, completion_tokens=2)


def collect(*messages: pb.ChatResponse) -> Collector:
    collector = Collector()
    for message in messages:
        collector.add(message)
    while collector.take() is not None:
        pass
    return collector


def test_thinking_is_apart() -> None:
    stop = pb.Delta(choice=0, finish_reason=pb.FINISH_REASON_STOP)
    answer = collect(pb.ChatResponse(deltas=[pb.Delta(reasoning="hm"), pb.Delta(reasoning="m"), pb.Delta(text="Yes."), stop],
                                     usage=pb.Usage(completion_tokens=5, reasoning_tokens=0))).answer()
    assert (answer.text, answer.choices[0].reasoning, answer.choices[0].finish_reason) == ("Yes.", "hmm", "stop")
    assert answer.usage.reasoning_tokens == 0


def test_what_a_later_router_says_is_no_damage() -> None:
    later = pb.Delta(text="x", finish_reason=7)  # type: ignore[arg-type]
    answer = collect(pb.ChatResponse(deltas=[later], usage=USAGE)).answer()
    assert (answer.choices[0].finish_reason, answer.usage.reasoning_tokens) == ("other", None)


@pytest.mark.parametrize("messages", [
    [], [pb.ChatResponse(deltas=[pb.Delta(text="x")])],
    [pb.ChatResponse(deltas=[pb.Delta(text="x", finish_reason=pb.FINISH_REASON_STOP)])],
    [pb.ChatResponse(deltas=[pb.Delta(text="x")], usage=USAGE)],
    [pb.ChatResponse(deltas=[pb.Delta(text="x", finish_reason=pb.FINISH_REASON_STOP), pb.Delta(choice=1, text="y")],
                     usage=USAGE)],
], ids=["nothing", "no end", "no usage", "no reason", "one of two"])
def test_an_answer_without_its_end_is_none(messages: list[pb.ChatResponse]) -> None:
    with pytest.raises(IncompleteError):
        collect(*messages).answer()
