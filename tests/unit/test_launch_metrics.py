"""What a supervisor counts: there from the start, and right at every scrape."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from slipstream.observability.supervisor_metrics import SupervisorMetrics


def test_a_deployment_in_numbers() -> None:
    serving = ["prefill", "router"]
    metrics = SupervisorMetrics(CollectorRegistry(), ["prefill", "decode", "decode", "router"], lambda: serving)

    def shown(name: str, **more: str) -> list[float | None]:
        return [metrics.registry.get_sample_value(f"slipstream_supervisor_{name}", {"role": role, **more})
                for role in ("prefill", "decode", "router")]

    assert shown("replicas_wanted") == [1, 2, 1]
    assert shown("replicas_serving") == [1, 0, 1]
    serving += ["decode", "decode"]
    assert shown("replicas_serving") == [1, 2, 1]
    assert shown("restarts_total", reason="unresponsive") == shown("adopted_total") == [0, 0, 0]
    metrics.restarted("decode", "unresponsive")
    metrics.restarted("decode", "unresponsive")
    metrics.restarted("router", "ended")
    metrics.adopted("prefill")
    assert shown("restarts_total", reason="unresponsive") == [0, 2, 0]
    assert shown("restarts_total", reason="ended") == [0, 0, 1]
    assert shown("restarts_total", reason="failed_start") == [0, 0, 0]
    assert shown("adopted_total") == [1, 0, 0]
    assert metrics.registry.get_sample_value("process_start_time_seconds")
