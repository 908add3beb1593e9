"""Which replicas serve a request, how many requests at once, and the text stream over any cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import policies
from router.doubts import Doubts
from router.policies import POLICIES, SCORE, Decision, Question, another_decode
from router.policy import Replica, missing
from router.stream import StopFilter
from slipstream.config_routing import RoutingConfig
from slipstream.errors import TransferError, UnavailableError
from slipstream.types import Role

P, D = Role.PREFILL, Role.DECODE


def replica(name: str, role: Role, compatibility_hash: str = "a", **more: Any) -> Replica:
    return Replica(id=name, role=role, compatibility_hash=compatibility_hash, **more)


def choose(replicas: list[Replica], policy: str = "least_load", *, local: bool = False, routing: dict[str, Any] | None = None,
           **question: Any) -> Decision:
    asked = Question(**{"tokens": 160, **question})
    return policies.choose(replicas, asked, policy, RoutingConfig(**routing or {}), local=local)


def pair(decision: Decision) -> tuple[str, str]:
    return decision.prefill.id if decision.prefill else "", decision.decode.id


def test_what_is_missing_is_named() -> None:
    assert "prefill" in missing([])
    assert "decode" in missing([])
    assert "decode" in missing([replica("p", P), replica("d", D, draining=True)])
    assert missing([replica("p", P), replica("d", D)]) == ""
    for policy in POLICIES:
        with pytest.raises(UnavailableError, match="decode") as caught:
            choose([replica("p", P)], policy)
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
        choose(replicas)
    assert "soon" not in caught.value.message
    with pytest.raises(UnavailableError):
        another_decode(replicas, replicas[0], not_now=(), turn=0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pair_has_a_channel_in_common_if_both_tell(policy: str) -> None:
    local, grpc = frozenset({"local"}), frozenset({"grpc"})
    replicas = [replica("p0", P, channels=grpc), replica("p1", P, in_flight=9, channels=local | {"rdma/nixl"}),
                replica("d", D, channels=local)]
    assert pair(choose(replicas, policy)) == ("p1", "d")
    more = [*replicas, replica("old", D)]
    chosen = [choose(more, policy, turn=turn) for turn in range(4)]
    assert all(one.prefill is not None and one.prefill.fits(one.decode) for one in chosen)


def test_the_least_loaded_pair_fits_together() -> None:
    replicas = [
        replica("p0", P, "a", in_flight=0),
        replica("p1", P, "b", in_flight=5),
        replica("p2", P, "b", in_flight=3),
        replica("d0", D, "b", waiting=4),
        replica("d1", D, "b", running=2),
        replica("d2", D, "c"),
    ]
    for turn in range(5):
        assert pair(choose(replicas, turn=turn)) == ("p2", "d1")


@pytest.mark.parametrize("policy", POLICIES)
def test_equals_take_turns(policy: str) -> None:
    replicas = [replica(f"{role.value}{number}", role) for role in Role for number in range(3)]
    chosen = [pair(choose(replicas, policy, turn=turn)) for turn in range(9)]
    assert len({one for one, _ in chosen}) == len({one for _, one in chosen}) == 3


def test_another_decode_is_another_if_there_is_one() -> None:
    replicas = [replica("d0", D), replica("d1", D, in_flight=9), replica("d2", D, "b")]
    assert another_decode(replicas, replica("p", P), not_now={"d0"}, turn=0).id == "d1"
    assert another_decode(replicas, replica("p", P), not_now={"d0", "d1"}, turn=0).id == "d0"
    with pytest.raises(UnavailableError):
        another_decode(replicas, replica("p", P, "c"), not_now=set(), turn=0)
    with pytest.raises(UnavailableError):
        another_decode(replicas, None, not_now=set(), turn=0)
    assert another_decode([*replicas, replica("d3", D, "c", computes_prompts=True)], None, not_now=(), turn=0).id == "d3"


@pytest.mark.parametrize("policy", POLICIES)
def test_replicas_that_failed_are_avoided_while_there_are_others(policy: str) -> None:
    replicas = [replica("p0", P), replica("p1", P, in_flight=9), replica("d0", D)]
    assert pair(choose(replicas, policy, doubts={"p0": 2, "d0": 2})) == ("p1", "d0")
    other_model = [replica("p0", P), replica("p1", P, "b"), replica("d0", D)]
    assert pair(choose(other_model, policy, doubts={"p0": 2}))[0] == "p0", "the other one fits with no decode replica"


@pytest.mark.parametrize("policy", POLICIES)
def test_of_doubtful_replicas_the_least_doubtful_one_is_taken(policy: str) -> None:
    replicas = [replica("p0", P), replica("p1", P, in_flight=9), replica("d0", D), replica("d1", D, in_flight=9)]
    assert pair(choose(replicas, policy, doubts={"p0": 4, "p1": 2, "d0": 2, "d1": 1})) == ("p1", "d1")


def test_a_silent_host_costs_a_request_two_runs_before_it_is_known_to_be_gone() -> None:
    """Both replicas of one host are gone, and their Sessions have not noticed: any run through them fails."""
    replicas = [replica("gone-p", P), replica("p", P, in_flight=9), replica("gone-d", D), replica("d", D, in_flight=9)]
    doubts, runs = Doubts(), 0
    while (run := pair(choose(replicas, "least_load", doubts=doubts.levels()))) != ("p", "d"):
        prefill, decode = run
        if decode == "gone-d":
            doubts.failed(decode, prefill, UnavailableError("it was lost"))
        else:
            doubts.failed(decode, prefill, TransferError("the source cannot be reached"))
        runs += 1
    assert runs == 2
    assert doubts.levels({"p"})["p"] == 2, "what others think counts too"


# Prefixes ----------------------------------------------------------------------------------------------------------------


def two(**more: Any) -> list[Replica]:
    return [replica(name, role, block_size=16, **more) for name, role in (("p0", P), ("p1", P), ("d0", D), ("d1", D))]


@pytest.mark.parametrize("policy", ["prefix", "auto"])
def test_a_prompt_goes_where_its_beginning_is(policy: str) -> None:
    hits = {"p1": (8, 0), "d0": (9, 0), "p0": (2, 0)}
    for turn in range(3):
        decision = choose(two(kv_bytes_per_token=100_000, channels=frozenset({"grpc"})), policy, turn=turn, hits=hits)
        assert pair(decision) == ("p1", "d0")
        assert decision.computed_tokens == 160 - 128
    assert choose(two(), policy, hits={"p1": (10, 0)}).computed_tokens == 16, "one token at least is computed"


def test_a_hybrid_prompt_is_cached_up_to_its_last_snapshot() -> None:
    hits = {"p0": (9, 0), "p1": (5, 4)}
    decision = choose(two(needs_snapshots=True), "auto", hits=hits)
    assert (pair(decision)[0], decision.computed_tokens) == ("p1", 160 - 64)
    assert choose(two(needs_snapshots=True), "prefix", hits=hits).computed_tokens == 160 - 64


def test_a_prefix_is_not_followed_into_a_crowd() -> None:
    replicas = two()
    replicas[1].in_flight = 5
    assert pair(choose(replicas, "prefix", hits={"p1": (8, 0)}))[0] == "p0"
    replicas[0].in_flight = 4
    assert pair(choose(replicas, "prefix", hits={"p1": (8, 0)}))[0] == "p1"


def test_auto_weighs_the_queue_against_the_prefix() -> None:
    replicas = two(tokens_per_second=1000.0)
    once = {"compute_weight": 1.0}
    replicas[1].waiting_tokens = 100
    assert pair(choose(replicas, "auto", hits={"p1": (8, 0)}, routing=once))[0] == "p1", "128 tokens less, behind 100"
    replicas[1].pending_tokens = 200
    assert pair(choose(replicas, "auto", hits={"p1": (8, 0)}))[0] == "p1", "they count for more than waiting"
    decision = choose(replicas, "auto", hits={"p1": (8, 0)}, routing=once)
    assert pair(decision)[0] == "p0"
    at = SCORE.index("queue_seconds")
    told = {score[0].id: score[at : at + 2] for score in decision.scores if score[0].role is P}
    assert told == {"p0": (0.0, 0.16), "p1": (0.2, 0.032)}, "every candidate comes with what it was measured by"


def test_auto_avoids_a_decode_replica_without_memory() -> None:
    replicas = two(total_blocks=100)
    for one in replicas:
        one.free_blocks = 100
    replicas[2].free_blocks = 5
    assert {pair(choose(replicas, "auto", turn=turn, hits={"d0": (5, 0)}))[1] for turn in range(4)} == {"d1"}
    replicas[2].free_blocks, replicas[3].free_blocks = 50, 40
    assert pair(choose(replicas, "auto"))[1] == "d0"


def test_auto_prefers_a_pair_of_one_machine_and_the_faster_channel() -> None:
    every = frozenset({"grpc", "local", "rdma/nixl"})
    replicas = [replica("p0", P, host="h0", channels=every, kv_bytes_per_token=10**7),
                replica("d0", D, host="h1", channels=frozenset({"grpc", "local"})),
                replica("d1", D, host="h1", channels=every),
                replica("d2", D, host="h0", channels=frozenset({"grpc", "local"}))]
    seconds = {}
    for decode in replicas[1:]:
        seconds[decode.id] = choose([replicas[0], decode], "auto", tokens=1000).transfer_seconds
    assert seconds["d1"] < seconds["d2"] < seconds["d0"], "rdma, local, grpc: local reaches over one machine alone"
    assert pair(choose(replicas, "auto", tokens=1000))[1] == "d1"


# Decode computes the prompt -------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_short_or_cached_is_computed_by_decode_where_that_is_allowed() -> None:
    replicas = two(computes_prompts=True)
    assert choose(replicas, "auto", tokens=20).local == "", "not by default"
    allowed = {"local_prefill_tokens": 32}
    assert choose(replicas, "auto", tokens=20, routing=allowed).local == "short"
    assert choose(replicas, "auto", tokens=33, routing=allowed).local == ""
    decision = choose(replicas, "auto", hits={"d1": (8, 0)}, routing=allowed)
    assert (pair(decision), decision.local, decision.computed_tokens) == (("", "d1"), "cached", 32)
    assert choose(replicas, "auto", tokens=20, text_only=False, routing=allowed).local == "", "decode never sees pictures"
    assert choose(two(), "auto", tokens=20, routing=allowed).local == "", "a decode replica of an older release"
    hybrid = two(computes_prompts=True, needs_snapshots=True)
    assert choose(hybrid, "auto", hits={"d1": (8, 0)}, routing=allowed).local == "", "its states are not there"


def test_a_decode_replica_that_others_decode_on_computes_less_readily() -> None:
    replicas = two(computes_prompts=True, tokens_per_second=1000.0)
    allowed = {"local_prefill_tokens": 32, "balance_seconds": 0.0, "compute_weight": 1.0}
    hits = {"p0": (7, 0), "d0": (8, 0)}
    assert choose(replicas, "auto", hits=hits, routing=allowed).local == "cached"
    for one in replicas[2:]:
        one.running = 40
    assert choose(replicas, "auto", hits=hits, routing=allowed).local == "", "40 streams would stall for it"


@pytest.mark.parametrize("policy", POLICIES)
def test_an_empty_prefill_pool_fails_unless_it_is_said_to_be_local(policy: str) -> None:
    decodes = [replica("d0", D, computes_prompts=True, in_flight=1), replica("d1", D, computes_prompts=True)]
    with pytest.raises(UnavailableError, match="no prefill"):
        choose(decodes, policy)
    decision = choose(decodes, policy, local=True)
    assert (pair(decision), decision.local, decision.computed_tokens) == (("", "d1"), "empty_pool", 160)
    draining = [*decodes, replica("p", P, draining=True)]
    assert choose(draining, policy, local=True).local == "empty_pool"
    assert choose([*decodes, replica("p", P)], policy, local=True).local == "", "it is not empty"
    with pytest.raises(UnavailableError, match="no prefill"):
        choose(decodes, policy, local=True, text_only=False)
    assert missing(decodes, local=True) == ""
    assert missing(decodes) != ""
    with pytest.raises(UnavailableError, match="fit together"):  # a misfit is no empty pool: somebody has to mend it
        choose([*decodes, replica("p", P, "b")], policy, local=True)


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


def loads(held: tuple[int, int] = (40, 40), had: tuple[int, int] = (10, 10), *, prefill: dict[str, Any] | None = None,
          decode: dict[str, Any] | None = None, doubts: dict[str, int] | None = None, **routing: Any) -> tuple[str, int] | None:
    """What a prompt of 1,000 tokens has loaded, in blocks of 16, that prefill has `had` of and decode `held`."""
    common: dict[str, Any] = {"block_size": 16, "kv_bytes_per_token": 1000, "channels": frozenset({"grpc"}),
                              "tokens_per_second": 10_000.0}
    one = replica("p", P, **common | (prefill or {}))
    replicas = [one, replica("d", D, **common | (decode or {})), replica("e", D, **common)]
    asked = Question(tokens=1000, hits={"p": had, "d": (0, 0)}, doubts=doubts or {})
    decision = Decision(policy="auto", prefill=one, decode=replicas[2], reason="", computed_tokens=0)
    found = policies.prefix_load(decision, asked, replicas, {"d": held, "e": (26, 26)}, RoutingConfig(**routing))
    return None if found is None else (found.source.id, found.tokens)


def test_what_decode_has_more_of_is_loaded_if_that_is_worth_it() -> None:
    assert loads() == ("d", 480)
    assert loads(load_tokens=480) == ("d", 480)
    assert loads(load_tokens=481) is None
    assert loads(load_tokens=0) is None
    assert loads((70, 70)) == ("d", 992 - 160), "one token at least is computed"
    assert loads(had=(24, 24)) == ("d", 256)
    assert loads(had=(25, 25)) is None
    assert loads(decode={"draining": True}) == ("e", 256), "the next best"
    assert loads(decode={"compatibility_hash": "b"}) == ("e", 256)
    assert loads(doubts={"d": 1}) == ("e", 256)
    assert loads(prefill={"kv_bytes_per_token": 1 << 21}) is None, "a gigabyte a second moves 500 tokens of 2 MiB in a second"
    assert loads(prefill={"tokens_per_second": 10e6}) is None, "computed in half a millisecond, weighed twelve times"
    hybrid = {"needs_snapshots": True}
    assert loads((40, 30), (10, 5), prefill=hybrid, decode=hybrid) == ("d", 16 * 25), "as far as snapshots go"
    assert loads((40, 0), (10, 5), prefill=hybrid, decode=hybrid) == ("e", 16 * 21)
