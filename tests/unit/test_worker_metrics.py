"""What a worker counts: right when idle, never raising, with bounded labels, and all of it documented."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from slipstream import errors
from slipstream.errors import SlipstreamError
from slipstream.observability.metrics import RouterMetrics
from slipstream.observability.supervisor_metrics import SupervisorMetrics
from slipstream.observability.transfer_metrics import TransferMetrics
from slipstream.observability.worker_metrics import WorkerMetrics
from slipstream.types import EngineCounters, EngineLoad, Role

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
IDLE = EngineLoad(waiting=0, running=0, parked=0, free_blocks=64, total_blocks=64, free_state_slots=8, total_state_slots=8)
CODES = {kind.code for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SlipstreamError)}


class Rig:
    """One worker's metrics, and the load that they look at."""

    def __init__(self, role: Role = Role.DECODE) -> None:
        self.load = IDLE
        self.role = role.value
        self.metrics = WorkerMetrics(CollectorRegistry(), role, lambda: self.load)

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"slipstream_worker_{name}", {"role": self.role, **labels})


def transfer(registry: CollectorRegistry) -> TransferMetrics:
    """Of one stream that was committed after a quarantine, so that every label is there."""
    metrics = TransferMetrics(registry, Role.DECODE, lambda: 3)
    metrics.stream_ended("receive", "grpc", "committed")
    metrics.quarantine_began("grpc")
    metrics.stream_committed("receive", "grpc", {"begin": 0.5, "end": 2.0}, kv_bytes=4096, state_bytes=0)
    metrics.channel_tried("grpc", "chosen")
    return metrics


def declared() -> dict[str, Metric]:
    """Every family of ours, of all kinds of process."""
    worker, router, supervisor = Rig().metrics.registry, CollectorRegistry(), CollectorRegistry()
    RouterMetrics(router)
    transfer(worker)
    SupervisorMetrics(supervisor, ["prefill", "decode", "router"], list)
    return {family.name: family for registry in (worker, router, supervisor) for family in registry.collect()
            if family.name.startswith("slipstream_")}


def test_gauges_are_what_the_engine_says_now() -> None:
    rig = Rig()
    rig.load = replace(IDLE, waiting=1, running=2, parked=3, free_blocks=10, free_state_slots=5, cached_blocks=7)
    shown = {name: rig(name) for name in ("waiting", "running", "parked", "kv_blocks", "kv_blocks_free", "kv_blocks_used",
                                          "kv_blocks_cached", "state_slots", "state_slots_used")}
    assert list(shown.values()) == [1, 2, 3, 64, 10, 54, 7, 8, 3]
    rig.load = IDLE  # everything was aborted at once: no request tells its gauge goodbye
    assert [rig(name) for name in ("waiting", "running", "parked", "kv_blocks_used", "state_slots_used")] == [0] * 5


def test_running_tells_prefill_from_decode() -> None:
    both = Rig(Role.PREFILL), Rig(Role.DECODE)
    for rig, count in zip(both, (2, 5), strict=True):
        rig.load = replace(IDLE, running=count)
    assert [rig("running") for rig in both] == [2, 5]


def test_what_the_engine_did_is_added_once() -> None:
    rig = Rig()
    first = EngineCounters(steps=3, step_seconds=0.5, prompt_tokens=10, cached_tokens=4, landed_tokens=20, reused_tokens=16,
                           output_tokens=7, spec_draft_tokens=6, spec_accepted_tokens=5, preemptions=1, evicted_blocks=2)
    rig.metrics.engine_did(first)
    rig.metrics.engine_did(first)
    rig.metrics.engine_did(replace(first, steps=5, output_tokens=9))
    names = ("steps", "step_seconds", "prompt_tokens", "cached_tokens", "landed_tokens", "reused_tokens", "output_tokens",
             "spec_draft_tokens", "spec_accepted_tokens", "preemptions", "evicted_blocks")
    assert [rig(f"{name}_total") for name in names] == [5, 0.5, 10, 4, 20, 16, 9, 6, 5, 1, 2]
    assert set(names) == set(EngineCounters.__dataclass_fields__), "nothing that the engine counts is left out"


@pytest.mark.parametrize("wrong", [-3, math.nan])
def test_a_counter_that_would_shrink_is_logged_and_counted_and_nothing_else(
    wrong: float, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    rig.metrics.engine_did(EngineCounters(output_tokens=5))
    with caplog.at_level(logging.ERROR):
        rig.metrics.engine_did(EngineCounters(output_tokens=5 + wrong, steps=1))  # type: ignore[arg-type]
    assert "output_tokens" in caplog.text
    assert (rig("output_tokens_total"), rig("steps_total"), rig("metric_faults_total")) == (5, 1, 1)
    rig.metrics.transfer_landed(wrong, kv_bytes=-1, state_bytes=2)
    assert rig("metric_faults_total") == 3
    assert [rig(name) for name in ("transfer_seconds_count", "transfer_seconds_sum")] == [0, 0]


@pytest.mark.parametrize("wrong", [-3, math.nan, math.inf])
def test_no_value_breaks_a_metric_of_the_router(wrong: float) -> None:
    """Much of what it records comes from other processes."""
    metrics = RouterMetrics(CollectorRegistry())
    with_labels = (metrics.transfer_bytes.labels("kv"), metrics.errors.labels("internal"))
    for counter in (metrics.prompt_tokens, metrics.cached_tokens, metrics.output_tokens, *with_labels):
        counter.inc(wrong)
    for histogram in (metrics.ttft, metrics.itl, metrics.e2e, metrics.transfer):
        histogram.observe(wrong)
    values = {sample.name: sample.value for family in metrics.registry.collect() for sample in family.samples
              if sample.name.startswith("slipstream_") and not sample.name.endswith("_created")}
    assert values.pop("slipstream_router_metric_faults_total") == 9
    assert set(values.values()) == {0}


def test_legs_are_counted_by_how_they_ended() -> None:
    rig = Rig()
    assert rig("requests_total", code="ok") == 0, "there from the start, so that a rate can be taken"
    for code in ("cancelled", "ok", "cancelled", "preempted", "cancelled"):
        rig.metrics.leg_ended(code)
    assert [rig("requests_total", code=code) for code in ("ok", "cancelled", "preempted")] == [1, 3, 1]
    assert rig("decode_seconds_count") == 0, "none of them got that far"


def test_a_leg_is_measured_as_its_role_does() -> None:
    prefill, decode = Rig(Role.PREFILL), Rig(Role.DECODE)
    prefill.metrics.leg_ended("ok", queue_seconds=0.25, compute_seconds=2.0)
    decode.metrics.transfer_landed(0.5, kv_bytes=4096, state_bytes=512)
    decode.metrics.leg_ended("ok", compute_seconds=3.0)
    sums = ("queue_seconds_sum", "prefill_seconds_sum", "decode_seconds_sum", "transfer_seconds_sum")
    assert [prefill(name) for name in sums] == [0.25, 2.0, 0, 0]
    assert [decode(name) for name in sums] == [0, 0, 3.0, 0.5]
    assert [decode("transfer_bytes_total", kind=kind) for kind in ("kv", "state")] == [4096, 512]


def test_a_stream_is_measured_by_step_and_kind() -> None:
    registry = CollectorRegistry()
    metrics = transfer(registry)
    metrics.stream_ended("send", "", "incompatible")
    labels = {"role": "decode", "side": "receive", "channel": "grpc"}

    def shown(name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"slipstream_worker_{name}", {**labels, **more})

    assert shown("streams_total", outcome="committed") == 1
    assert shown("streams_total", side="send", channel="none", outcome="incompatible") == 1, "refused before it had a channel"
    assert [shown("stream_seconds_sum", step=step) for step in ("begin", "end", "ready")] == [0.5, 2.0, None]
    assert [shown("stream_bytes_sum", kind=kind) for kind in ("kv", "state")] == [4096, 0]
    assert shown("stream_bytes_bucket", kind="kv", le="4096.0") == 1
    assert registry.get_sample_value("slipstream_worker_quarantined", {"role": "decode"}) == 3


def test_labels_are_bounded() -> None:
    rig = Rig()
    for code in CODES:
        rig.metrics.leg_ended(code, compute_seconds=1)
    rig.metrics.transfer_landed(0.5, kv_bytes=1, state_bytes=1)
    rig.metrics.describe({"block_size": "16", "version": "1"})
    samples = [sample for family in rig.metrics.registry.collect() for sample in family.samples]
    assert {label for sample in samples for label in sample.labels if sample.name != "slipstream_worker_info"} == {
        "role", "kind", "code", "le"}
    assert rig("info", block_size="16", version="1") == 1
    before = len(samples)
    for number in range(50):
        rig.load = replace(IDLE, running=number)
        rig.metrics.leg_ended("ok")
        rig.metrics.engine_did(EngineCounters(steps=number))
    assert sum(len(family.samples) for family in rig.metrics.registry.collect()) == before


def test_names_follow_the_conventions_and_the_text_can_be_parsed() -> None:
    families = declared()
    for name, family in families.items():
        assert re.fullmatch(r"slipstream_(worker|router|supervisor)(_[a-z0-9]+)*", name), name
        assert family.documentation.endswith("."), f"{name} says what it is"
        assert not name.endswith(("_total", "_count", "_sum", "_bucket", "_info", "milliseconds", "_ms", "_mb")), name
        if family.type == "histogram":
            assert name.endswith(("_seconds", "_bytes")), f"{name} says its unit"
    registry = Rig().metrics.registry
    transfer(registry)
    text = generate_latest(registry).decode()
    parsed = {family.name: family for family in text_string_to_metric_families(text)}
    shown = {name for name, family in families.items() if name.startswith("slipstream_worker") and family.type != "info"}
    assert shown <= parsed.keys()


def test_the_page_lists_exactly_what_is_declared() -> None:
    rows = re.findall(r"^\| `(slipstream_\w+)(?:\{([\w,]*)\})?` \| (\w+) \| (.+?) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    said = {name: (kind, set(filter(None, labels.split(",")))) for name, labels, kind, _, _ in rows}
    assert len(rows) == len(said), "none is listed twice"
    suffix = {"counter": "_total", "info": "_info"}
    real = {family.name + suffix.get(family.type, ""): family for family in declared().values()}
    assert {name: kind for name, (kind, _) in said.items()} == {name: family.type for name, family in real.items()}
    for name, family in real.items():
        for sample in family.samples:  # a family with labels has none before the first value
            assert family.type == "info" or said[name][1] == sample.labels.keys() - {"le"}, name
