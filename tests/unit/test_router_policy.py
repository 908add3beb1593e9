"""Which replicas serve a request, how many requests at once, and the text stream over any cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.policy import Replica, another_decode, choose, missing
from router.stream import StopFilter
from slipstream.errors import UnavailableError
from slipstream.types import Role

P, D = Role.PREFILL, Role.DECODE


def replica(name: str, role: Role, compatibility_hash: str = "a", **more: Any) -> Replica:
    return Replica(id=name, role=role, compatibility_hash=compatibility_hash, **more)


def test_what_is_missing_is_named() -> None:
    assert "prefill" in missing([])
    assert "decode" in missing([])
    assert "decode" in missing([replica("p", P), replica("d", D, draining=True)])
    assert missing([replica("p", P), replica("d", D)]) == ""
    with pytest.raises(UnavailableError, match="decode") as caught:
        choose([replica("p", P)], turn=0)
    assert caught.value.retry_after_seconds


@pytest.mark.parametrize(("prefill", "decode", "says"), [
    ({"compatibility_hash": "b", "block_size": 16}, {"block_size": 32}, "block_size is 16 at prefill and 32 at decode; set it"),
    ({"compatibility_hash": "b", "dtype": "float32"}, {"dtype": "bfloat16"}, "model.dtype is float32 at prefill and bfloat16"),
    ({"compatibility_hash": "b"}, {}, "hashes differ, b at prefill and a at decode; serve the same weights"),
    ({"channels": frozenset({"rdma/nixl"})}, {"channels": frozenset({"rdma/mooncake", "local"})},
     "prefill offers the channels rdma/nixl, decode local, rdma/mooncake; set transfer.channel and transfer.rdma.engine to"),
])
def test_what_keeps_the_sides_apart_is_named_with_both_values_and_is_not_said_to_pass(
        prefill: dict[str, Any], decode: dict[str, Any], says: str) -> None:
    replicas = [replica("p", P, **prefill), replica("d", D, **decode)]
    assert says in missing(replicas)
    with pytest.raises(UnavailableError, match="fit together") as caught:
        choose(replicas, turn=0)
    assert "soon" not in caught.value.message
    with pytest.raises(UnavailableError):
        another_decode(replicas, replicas[0], not_now=(), turn=0)


def test_a_pair_has_a_channel_in_common_if_both_tell() -> None:
    local, grpc = frozenset({"local"}), frozenset({"grpc"})
    replicas = [replica("p0", P, channels=grpc), replica("p1", P, in_flight=9, channels=local | {"rdma/nixl"}),
                replica("d", D, channels=local)]
    assert choose(replicas, turn=0).prefill.id == "p1"
    assert choose([*replicas, replica("old", D)], turn=0).prefill.id == "p0"


def test_a_pair_fits_together_and_is_the_least_loaded() -> None:
    replicas = [
        replica("p0", P, "a", in_flight=0),
        replica("p1", P, "b", in_flight=5),
        replica("p2", P, "b", in_flight=3),
        replica("d0", D, "b", waiting=4),
        replica("d1", D, "b", running=2),
        replica("d2", D, "c"),
    ]
    for turn in range(5):
        pair = choose(replicas, turn=turn)
        assert (pair.prefill.id, pair.decode.id) == ("p2", "d1")


def test_equals_take_turns() -> None:
    replicas = [replica(f"{role.value}{number}", role) for role in Role for number in range(3)]
    assert len({choose(replicas, turn=turn).prefill.id for turn in range(3)}) == 3
    assert len({choose(replicas, turn=turn).decode.id for turn in range(3)}) == 3


def test_another_decode_is_another_if_there_is_one() -> None:
    replicas = [replica("d0", D), replica("d1", D, in_flight=9), replica("d2", D, "b")]
    assert another_decode(replicas, replica("p", P), not_now={"d0"}, turn=0).id == "d1"
    assert another_decode(replicas, replica("p", P), not_now={"d0", "d1"}, turn=0).id == "d0"
    with pytest.raises(UnavailableError):
        another_decode(replicas, replica("p", P, "c"), not_now=set(), turn=0)


def test_replicas_that_failed_are_avoided_while_there_are_others() -> None:
    replicas = [replica("p0", P), replica("p1", P, in_flight=9), replica("d0", D)]
    pair = choose(replicas, turn=0, not_now={"p0", "d0"})
    assert (pair.prefill.id, pair.decode.id) == ("p1", "d0")
    other_model = [replica("p0", P), replica("p1", P, "b"), replica("d0", D)]
    assert choose(other_model, turn=0, not_now={"p0"}).prefill.id == "p0", "the other one fits with no decode replica"


# Stop strings ----------------------------------------------------------------------------------------------------------


@given(st.text("ab ", max_size=30), st.lists(st.text("ab ", min_size=1, max_size=5), min_size=1, max_size=3), st.data())
@settings(max_examples=300, deadline=None)
def test_stop_strings_over_any_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    # Pieces come one after another: the stop whose end is first in the text is the one that stops it.
    first_end = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
    one_by_one = StopFilter(stops)
    seen = ""
    for letter in text:
        seen += one_by_one.add(letter)
        assert not any(stop in seen for stop in stops), "no part of a stop string is ever shown"
    seen += one_by_one.finish()
    if first_end is None:
        assert seen == text
    else:
        assert one_by_one.stopped
        assert seen == min((text[: text.find(stop)] for stop in stops if stop in text[:first_end]), key=len)
    cut = data.draw(st.integers(0, len(text)))
    whole = StopFilter(stops)
    joined = whole.add(text[:cut]) + whole.add(text[cut:]) + whole.finish()
    assert joined == text if not found else text.startswith(joined)
