"""The record of requests: bounded, private, oldest first out, never in the way of a request."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import ConfigError
from slipstream.observability.record import Recorder


def lines(recorder: Recorder) -> list[dict[str, Any]]:
    """Oldest first."""
    old = Path(f"{recorder.path}.1")
    text = (old.read_text() if old.exists() else "") + recorder.path.read_text()
    return [json.loads(line) for line in text.splitlines()]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_the_bound_holds_and_the_oldest_go_first(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "new" / "folder", "router", 4000)
    for number in range(200):
        recorder.write({"id": number, "tokens": list(range(number % 40))})
        assert size(recorder.path.parent) <= 4000
    kept = [line["id"] for line in lines(recorder)]
    assert kept == list(range(kept[0], 200)), "the latest, without a gap"
    assert size(recorder.path.parent) > 1000, "most of the room is used"
    recorder.close()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 900), max_size=40), st.integers(100, 2000))
def test_any_lengths_stay_within_any_bound(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], bound: int) -> None:
    folder = tmp_path_factory.mktemp("record")
    recorder = Recorder(folder, "router", bound)
    for length in lengths:
        recorder.write({"text": "x" * length})
        assert size(folder) <= bound
    fitting = [length for length in lengths if length + len('{"text":""}\n') <= bound // 2]
    assert [len(line["text"]) for line in lines(recorder)] == fitting[len(fitting) - len(lines(recorder)) :]
    recorder.close()


def test_one_that_is_too_long_is_left_out_loudly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path, "router", 1000)
    recorder.write({"id": 1})
    recorder.write({"secret": "x" * 600})
    recorder.write({"id": 2})
    assert [line["id"] for line in lines(recorder)] == [1, 2]
    assert "debug.record_bytes" in caplog.text
    assert "xxx" not in caplog.text
    recorder.close()


def test_a_restart_goes_on_and_a_second_process_has_its_own(tmp_path: Path) -> None:
    first, second = Recorder(tmp_path, "router", 1000), Recorder(tmp_path, "router", 1000)
    first.write({"id": 1})
    second.write({"id": 2})
    assert first.path != second.path
    first.close()
    again = Recorder(tmp_path, "router", 1000)
    again.write({"id": 3})
    assert [line["id"] for line in lines(again)] == [1, 3]
    assert [line["id"] for line in lines(second)] == [2]
    for recorder in (again, second):
        recorder.close()


def test_it_is_for_its_owner_alone_and_says_that_it_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        recorder = Recorder(tmp_path / "record", "router", 1000)
    assert "RECORDED" in caplog.text
    assert str(recorder.path) in caplog.text
    recorder.write({"id": 1})
    assert {stat.S_IMODE(path.stat().st_mode) for path in recorder.path.parent.iterdir()} == {0o600}
    assert stat.S_IMODE(recorder.path.parent.stat().st_mode) == 0o700
    recorder.close()


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"debug\.record_dir") as caught:
        Recorder(tmp_path / "file", "router", 1000)
    assert caught.value.field == "debug.record_dir"


def test_a_failure_ends_the_recording_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path / "record", "router", 100)
    os.rename(tmp_path / "record", tmp_path / "elsewhere")
    for number in range(20):
        recorder.write({"id": number})
    assert caplog.text.count("recording has ended") == 1
    recorder.close()
