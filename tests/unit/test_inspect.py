"""What `status --kernels --ledger` shows: the kernel table, and how it and the ledgers are printed."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from launch.status import show
from slipstream.kernels import dispatch, reference


def test_every_operation_is_in_the_table_with_its_reason() -> None:
    kernels = dispatch.choose("reference")
    rows = {row.op: row for row in kernels.rows()}
    assert rows.keys() == {field.name for field in fields(kernels)} - {"name", "reason"}
    for op, row in rows.items():
        module, _, name = row.implementation.partition(".")
        assert (module, getattr(reference, name)) == ("reference", getattr(kernels, op))
        assert row.reason == "reference is the only backend"


def replica(name: str, holdings: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"replica_id": name, "role": "decode", "state": "ready", "epoch": 1, "address": "x:1", "load": {},
            "kernels": [{"op": "rotary", "implementation": "reference.rotary", "reason": "the only one"}], "holdings": holdings,
            **more}


FIELDS = {"replicas": [
    replica("decode-0", [{"owner": "free", "request_id": "", "blocks": 40, "state_slots": 7},
                         {"owner": "sequence", "request_id": "req-5", "blocks": 3, "state_slots": 1}]),
    replica("decode-1", [{"owner": "free", "request_id": "", "blocks": 43, "state_slots": 8}]),
    {"replica_id": "decode-2", "role": "decode", "inspect_problem": "it does not answer"},
]}


def printed(capsys: pytest.CaptureFixture[str], **wanted: bool) -> list[list[str]]:
    show("http://x", FIELDS, "", **{"as_json": False, **wanted})
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_the_tables_are_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    plain = printed(capsys)
    assert not any("rotary" in line or "free" in line[1:2] for line in plain)
    lines = printed(capsys, kernels=True, ledger=True)
    assert ["decode-0,", "decode-1", "rotary", "reference.rotary", "the", "only", "one"] in lines, "equal tables are one"
    assert ["decode-0", "free", "40", "7"] in lines
    assert ["sequence", "req-5", "3", "1"] in lines
    assert ["decode-1", "free", "43", "8"] in lines
    assert ["decode-2:", "it", "does", "not", "answer"] in lines
    assert not any("rotary" in line for line in printed(capsys, ledger=True))


def test_json_is_what_the_router_says(capsys: pytest.CaptureFixture[str]) -> None:
    show("http://x", FIELDS, "", as_json=True, kernels=True)
    assert json.loads(capsys.readouterr().out) == FIELDS


def test_what_does_not_serve_is_shown_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"replica_id": "decode-0", "role": "decode", "state": "restarting", "epoch": 3, "problem": "ended with status 1"},
            {"replica_id": "", "role": "?", "state": "disconnected", "address": "x:2", "problem": "it does not answer"}]
    show("http://x", {"replicas": rows}, "", as_json=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["decode-0", "decode", "restarting", "3"] in lines
    assert lines[-2:] == [["decode-0:", "ended", "with", "status", "1"], ["x:2:", "it", "does", "not", "answer"]]
