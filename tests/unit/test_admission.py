"""decode.admission: who may land, who has to come back, and when."""

from __future__ import annotations

from decode.admission import CLAIM_SECONDS, MAX_RETRY_SECONDS, MIN_RETRY_SECONDS, Admission, Need
from slipstream.types import EngineLoad


def load(free_blocks: int, free_slots: int = 4, total_slots: int = 4, running: int = 0) -> EngineLoad:
    return EngineLoad(waiting=0, running=running, parked=0, free_blocks=free_blocks, total_blocks=100,
                      free_state_slots=free_slots, total_state_slots=total_slots)


def end(admission: Admission, *times: float) -> None:
    for number, now in enumerate(times):
        admission.admitted(f"earlier-{number}")
        admission.ended(f"earlier-{number}", now)


def test_the_end_of_a_refused_request_says_nothing_about_memory() -> None:
    admission = Admission()
    end(admission, 0.0, 0.5)
    hint = admission.refused("a", Need(blocks=1), load(0), 1.0).retry_after_seconds
    admission.ended("a", 1.0)
    assert admission.refused("a", Need(blocks=1), load(0), 1.0).retry_after_seconds == hint == 0.5


def test_an_empty_line_admits_everybody() -> None:
    admission = Admission()
    assert admission.ask("a", Need(blocks=100), load(100), 0.0) is None
    assert admission.ask("b", Need(blocks=200), load(0), 0.0) is None, "the pools say no, not the line"


def test_a_refusal_names_what_is_missing() -> None:
    admission = Admission()
    assert "30 blocks are needed, 20 of 100" in admission.refused("a", Need(blocks=30), load(20), 0.0).reason
    assert "1 state slots are needed, 0 of 4" in admission.refused("b", Need(blocks=1), load(20, free_slots=0), 0.0).reason
    crowded = load(20, running=7, total_slots=0, free_slots=0)
    assert "7 sequences run" in admission.refused("c", Need(blocks=1), crowded, 0.0).reason


def test_a_small_request_does_not_starve_a_large_one() -> None:
    admission = Admission()
    admission.refused("large", Need(blocks=60), load(50), 0.0)
    busy = admission.ask("small", Need(blocks=10), load(50), 0.1)
    assert busy is not None
    assert "1 requests wait" in busy.reason
    assert admission.ask("large", Need(blocks=60), load(60), 0.2) is None, "the head of the line is asked for nothing"
    admission.admitted("large")
    assert admission.ask("small", Need(blocks=10), load(50), 0.3) is None, "nobody is ahead of it any more"


def test_a_small_request_passes_where_it_leaves_enough() -> None:
    admission = Admission()
    admission.refused("large", Need(blocks=60), load(50), 0.0)
    assert admission.ask("small", Need(blocks=10), load(70), 0.1) is None
    assert admission.ask("small", Need(blocks=11), load(70), 0.1) is not None


def test_the_last_state_slot_is_kept_for_the_head() -> None:
    admission = Admission()
    admission.refused("first", Need(blocks=1), load(100, free_slots=0), 0.0)
    assert admission.ask("second", Need(blocks=1), load(100, free_slots=1), 0.1) is not None
    assert admission.ask("third", Need(blocks=1), load(100, free_slots=2), 0.1) is None


def test_a_place_is_lost_after_a_while() -> None:
    admission = Admission()
    admission.refused("gone", Need(blocks=60), load(50), 0.0)
    assert admission.ask("small", Need(blocks=10), load(50), CLAIM_SECONDS) is not None
    admission = Admission()
    admission.refused("gone", Need(blocks=60), load(50), 0.0)
    assert admission.ask("small", Need(blocks=10), load(50), CLAIM_SECONDS + 0.01) is None


def test_a_place_is_kept_over_refusals_and_the_hint_grows_with_it() -> None:
    admission = Admission()
    end(admission, 0.0, 0.5, 1.0)
    hints = [admission.refused(name, Need(blocks=60), load(50), 1.0).retry_after_seconds for name in ("a", "b")]
    assert hints[1] == min(MAX_RETRY_SECONDS, 2 * hints[0])
    admission.refused("a", Need(blocks=60), load(50), 1.9)  # asks again: still the first
    assert admission.ask("a", Need(blocks=60), load(50), 2.5) is None
    assert admission.ask("b", Need(blocks=60), load(50), 2.5) is not None


def test_hints_are_bounded() -> None:
    admission = Admission()
    assert admission.refused("a", Need(blocks=1), load(0), 0.0).retry_after_seconds >= MIN_RETRY_SECONDS
    end(admission, 0.0, 0.0)
    assert admission.refused("b", Need(blocks=1), load(0), 1000.0).retry_after_seconds == MAX_RETRY_SECONDS
