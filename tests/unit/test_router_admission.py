"""Turns: bounds, priorities, fairness, budgets; keys; breakers."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import keys
from router.admission import ANYBODY, Admission, Client, Phase, Turn
from router.breaker import INNOCENT, Breakers
from slipstream.errors import (
    AuthenticationError,
    ConfigError,
    InternalError,
    OverloadedError,
    TransferError,
    UnavailableError,
)
from slipstream.types import Role


def come(admission: Admission, client: Client = ANYBODY, *, priority: int = 0, tokens: int = 10, now: float = 0.0) -> Turn:
    turn, _ = admission.enter(client, priority, now)
    admission.ask(turn, prompt_tokens=tokens, most_output=0, now=now)
    return turn


# Turns -----------------------------------------------------------------------------------------------------------------


def test_bounds() -> None:
    admission = Admission(max_running=2, max_waiting=1)
    turns = [come(admission) for _ in range(3)]
    assert [turn.phase for turn in turns] == [Phase.RUNNING, Phase.RUNNING, Phase.WAITING]
    with pytest.raises(OverloadedError) as caught:
        come(admission)
    assert (caught.value.retry_after_seconds or 0) >= 1
    assert admission.leave(turns[0], now=1.0) == [turns[2]]
    assert admission.leave(turns[0], now=1.0) == [], "the second time"
    assert (admission.held, admission.running, admission.waiting) == (2, 2, 0)


def test_who_prepares_is_counted() -> None:
    admission = Admission(max_running=1, max_waiting=1)
    admission.enter(ANYBODY, 0, 0.0)
    admission.enter(ANYBODY, 0, 0.0)
    with pytest.raises(OverloadedError):
        admission.enter(ANYBODY, 0, 0.0)


def test_lower_priority_numbers_first() -> None:
    admission = Admission(max_running=1, max_waiting=9)
    running = come(admission)
    late, soon, urgent = come(admission, priority=5), come(admission), come(admission, priority=-1)
    order = []
    while admission.held:
        begun = admission.leave(running, now=0.0)
        order += begun
        running = begun[0] if begun else running
    assert order == [urgent, soon, late]


def test_a_better_priority_takes_the_last_place_of_a_full_router() -> None:
    admission = Admission(max_running=1, max_waiting=2)
    come(admission)
    first, second = come(admission, priority=3), come(admission, priority=4)
    newcomer, lost = admission.enter(ANYBODY, 3, 0.0)
    assert lost == [second]
    assert second.phase is Phase.OVER
    assert second.refusal is not None
    with pytest.raises(OverloadedError):
        admission.enter(ANYBODY, 3, 0.0)
    assert first.phase is Phase.WAITING
    assert newcomer.phase is Phase.PREPARING


def test_tokens_bound_what_runs_and_a_large_one_is_not_overtaken() -> None:
    admission = Admission(max_running=9, max_waiting=9, max_tokens=100)
    small = come(admission, tokens=60)
    large, behind = come(admission, tokens=500), come(admission, tokens=1)
    assert (large.phase, behind.phase) == (Phase.WAITING, Phase.WAITING)
    assert admission.leave(small, now=0.0) == [large], "alone, as it is more than all"
    assert admission.leave(large, now=0.0) == [behind]


def test_clients_share_by_weight() -> None:
    heavy, light = Client(name="heavy", weight=3.0), Client(name="light")
    admission = Admission(max_running=1, max_waiting=99)
    running = come(admission)
    for _ in range(20):
        come(admission, heavy)
    for _ in range(20):
        come(admission, light)
    order = list[str]()
    while len(order) < 16:
        running = admission.leave(running, now=0.0)[0]
        order.append(running.client.name)
    assert Counter(order) == {"heavy": 12, "light": 4}, "though all of the heavy one's came before"


def test_a_client_at_its_limit_is_passed_by() -> None:
    one, other = Client(name="one", max_in_flight=1), Client(name="other")
    admission = Admission(max_running=3, max_waiting=9)
    first, second, third = come(admission, one), come(admission, one), come(admission, other)
    assert (first.phase, second.phase, third.phase) == (Phase.RUNNING, Phase.WAITING, Phase.RUNNING)
    assert admission.leave(third, now=0.0) == []
    assert admission.leave(first, now=0.0) == [second]


def test_requests_of_a_key_in_a_minute() -> None:
    client = Client(name="k", requests_per_minute=2)
    admission = Admission(max_running=9)
    come(admission, client)
    come(admission, client)
    with pytest.raises(OverloadedError, match="requests_per_minute") as caught:
        come(admission, client)
    assert caught.value.retry_after_seconds == pytest.approx(30)
    come(admission, client, now=30.0)
    come(admission, Client(name="another"))


def test_tokens_of_a_key_in_a_minute_outputs_too() -> None:
    client = Client(name="k", tokens_per_minute=100)
    admission = Admission(max_running=9)
    turn = come(admission, client, tokens=40)
    with pytest.raises(OverloadedError, match="60 of its 100") as caught:
        come(admission, client, tokens=90)
    assert caught.value.retry_after_seconds == pytest.approx(18)
    admission.leave(turn, output_tokens=90, now=0.0)
    with pytest.raises(OverloadedError):
        admission.enter(client, 0, 1.0)
    assert come(admission, client, tokens=1000, now=120.0).phase is Phase.RUNNING, "more than a minute's worth, but all of it"


EVENTS = st.tuples(st.sampled_from(["enter", "ask", "leave"]), st.integers(0, 7), st.integers(-1, 2), st.integers(1, 60))


@given(st.lists(EVENTS, max_size=60))
@settings(max_examples=300, deadline=None)
def test_turns_under_any_order_of_events(events: list[tuple[str, int, int, int]]) -> None:
    admission = Admission(max_running=3, max_waiting=2, max_tokens=100)
    clients = [Client(name="a", max_in_flight=2), Client(name="b", weight=2.0)]
    turns: list[Turn] = []
    for number, (what, which, priority, tokens) in enumerate(events):
        now = float(number)
        if what == "enter":
            try:
                turn, lost = admission.enter(clients[which % 2], priority, now)
            except OverloadedError:
                assert admission.held == 5
            else:
                turns.append(turn)
                assert all(one.priority > priority for one in lost)
        elif turns:
            turn = turns[which % len(turns)]
            if what == "ask" and turn.phase is Phase.PREPARING:
                admission.ask(turn, prompt_tokens=tokens, most_output=5, now=now)
            elif what == "leave":
                admission.leave(turn, output_tokens=3, now=now)
        of = {phase: [turn for turn in turns if turn.phase is phase] for phase in Phase}
        running, waiting = of[Phase.RUNNING], of[Phase.WAITING]
        assert (admission.running, admission.waiting) == (len(running), len(waiting))
        assert admission.held == len(running) + len(waiting) + len(of[Phase.PREPARING]) <= 5
        assert admission.tokens == pytest.approx(sum(turn.cost for turn in running))
        assert len(running) <= 3
        assert len(running) <= 1 or admission.tokens <= 100
        assert sum(turn.client is clients[0] for turn in running) <= 2
        assert running or not waiting, "somebody runs as long as somebody wants to"
    for turn in turns:
        admission.leave(turn, now=99.0)
    assert (admission.held, admission.running, admission.waiting) == (0, 0, 0)
    assert admission.tokens == pytest.approx(0)


# Keys ------------------------------------------------------------------------------------------------------------------


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def written(folder: Path, text: str) -> str:
    path = folder / "keys.toml"
    path.write_text(text)
    return str(path)


def test_keys(tmp_path: Path) -> None:
    known = keys.load(written(tmp_path, f'[keys.alice]\nsha256 = "{digest("sesame")}"\nweight = 2.0\nmax_in_flight = 3\n'))
    alice = known.client("Bearer sesame")
    assert (alice.name, alice.weight, alice.max_in_flight, alice.tokens_per_minute) == ("alice", 2.0, 3, 0)
    assert known.client("bearer  sesame ") == alice
    for wrong in (None, "", "sesame", "Basic sesame", "Bearer", "Bearer sesam", f"Bearer {digest('sesame')}", "Bearer ü"):
        with pytest.raises(AuthenticationError):
            known.client(wrong)
    assert keys.load("").client(None) is ANYBODY


@pytest.mark.parametrize(("text", "why"), [
    ("", r"holds no \[keys.NAME\]"), ("[keys", "cannot read"), ("[keys.a]\nweight = 1.0", "sha256"),
    ('[keys.a]\nsha256 = "ab"', "64 hex digits"), (f'[keys.a]\nsha256 = "{digest("a")}"\nwait = 1', "wait"),
    (f'[keys.a]\nsha256 = "{digest("a")}"\nweight = 0.0', "above 0"),
    (f'[keys.a]\nsha256 = "{digest("a")}"\nmax_in_flight = -1', "at least 0"),
    (f'[keys.a]\nsha256 = "{digest("a")}"\n[keys.b]\nsha256 = "{digest("a")}"', "the same key"),
])
def test_a_file_of_keys_that_is_wrong(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        keys.load(written(tmp_path, text))
    with pytest.raises(ConfigError, match="cannot read"):
        keys.load(str(tmp_path / "nowhere.toml"))


# Breakers --------------------------------------------------------------------------------------------------------------


def breakers() -> tuple[Breakers, list[Role], list[float]]:
    opened, now = list[Role](), [0.0]
    return Breakers(3, 10.0, opened.append, lambda: now[0]), opened, now


def test_a_breaker_opens_tries_again_and_closes() -> None:
    replicas, opened, now = breakers()
    for _ in range(3):
        assert replicas.open() == set()
        replicas.failed("d0", Role.DECODE, InternalError("x"))
    assert replicas.open() == {"d0"}
    assert opened == [Role.DECODE]
    now[0] = 10.0
    assert replicas.open() == set(), "one may try"
    replicas.sent("d0")
    assert replicas.open() == {"d0"}, "the others wait for what becomes of it"
    replicas.failed("d0", Role.DECODE, TransferError("x"))
    now[0] = 19.0
    assert replicas.open() == {"d0"}
    assert opened == [Role.DECODE], "counted once"
    now[0] = 21.0
    replicas.sent("d0")
    replicas.succeeded("d0")
    assert replicas.open() == set()
    replicas.failed("d0", Role.DECODE, InternalError("x"))
    assert replicas.open() == set(), "it counts from the beginning again"


def test_what_is_no_fault_of_a_replica_opens_nothing() -> None:
    replicas, _, _ = breakers()
    for kind in INNOCENT:
        for _ in range(9):
            replicas.failed("d0", Role.DECODE, kind("x"))
    assert replicas.open() == set()
    for _ in range(2):
        replicas.failed("d0", Role.DECODE, UnavailableError("lost"))
    replicas.succeeded("d0")
    replicas.failed("d0", Role.DECODE, UnavailableError("lost"))
    assert replicas.open() == set(), "only what fails in a row"


def test_no_failures_is_no_breaker() -> None:
    replicas = Breakers(0, 10.0, lambda role: None)
    for _ in range(99):
        replicas.failed("d0", Role.DECODE, InternalError("x"))
    assert replicas.open() == set()
