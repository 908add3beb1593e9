"""The arithmetic of the benchmarks, their memory, and one small run of a suite by the command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from bench import SUITES, families, harness
from bench.harness import Result, Sample
from bench.pool import LAYERS, Job, Pool
from slipstream.errors import ConfigError, InternalError
from slipstream.models import registry


def sample(seconds: float, cpu: float = 0.0) -> Sample:
    return Sample(bytes=2**30, seconds=seconds, cpu_seconds=cpu)


def test_a_sample_is_in_decimal_gigabytes_and_cpu_seconds_of_a_binary_one() -> None:
    assert sample(2.0, 3.0).gigabytes_per_second == pytest.approx(2**30 / 2e9)
    assert sample(2.0, 3.0).cpu_per_gib == 3.0


def test_a_summary_takes_medians_and_says_how_far_apart_they_were() -> None:
    found = harness.summary([sample(1.0, 5.0), sample(2.0, 1.0), sample(4.0, 2.0)])
    assert found["gb_per_second"] == pytest.approx(2**30 / 2e9)
    assert found["cpu_seconds_per_gib"] == 2.0
    assert found["spread"] == pytest.approx((1 - 0.25) / 0.5)


def test_a_ratio_compares_round_by_round() -> None:
    # The machine was half as fast in the second round: the ratio of the medians would be 3, each round says 2 or 4.
    assert harness.paired_ratio([20.0, 12.0, 40.0], [10.0, 6.0, 10.0]) == 2.0
    for wrong in ([], [1.0]):
        with pytest.raises(InternalError):
            harness.paired_ratio(wrong, [1.0, 2.0])


def test_rounds_run_every_method_as_often_and_start_with_different_ones() -> None:
    order: list[str] = []

    def method(name: str) -> Sample:
        order.append(name)
        return sample(1.0)

    found = harness.rounds({name: lambda name=name: method(name) for name in "abc"}, 3)  # type: ignore[misc]
    assert {name: len(each) for name, each in found.items()} == {"a": 3, "b": 3, "c": 3}
    assert len({tuple(order[i : i + 3]) for i in (0, 3, 6)}) == 3


def test_the_cpu_clock_of_another_process_runs_only_while_it_works() -> None:
    work = "import sys\nfor i in range(3 * 10**6): pass\nprint(flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        first = harness.cpu_clock(child.pid)
        assert 0.01 < first < 60
        assert harness.cpu_clock(child.pid) - first < 0.05
        assert child.stdin is not None
        child.stdin.close()
    begin = harness.cpu_clock(0), time.process_time()
    sum(range(10**5))
    assert harness.cpu_clock(0) - begin[0] == pytest.approx(time.process_time() - begin[1], abs=0.01)


@pytest.mark.parametrize("layers", [LAYERS, 1])
def test_a_pool_sees_a_block_that_came_to_the_wrong_place(layers: int) -> None:
    job = Job(3, True, 4, layers)
    pool, table = Pool(4, layers), job.table("source")
    assert pool.wrong(table) == 3 * layers
    pool.fill(table)
    assert pool.wrong(table) == 0
    assert pool.wrong((table[1], table[0], table[2])) == 2 * layers
    assert job.bytes == sum(size for _, size in pool.pieces(table))
    pool.clear()
    assert pool.wrong(table) == 3 * layers


def test_every_registered_architecture_has_a_tiny_configuration() -> None:
    assert families.TINY.keys() == registry.architectures().keys()


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="wire, bytes"):
        harness.run("speed", Console(), quick=True, as_json=True)


def test_a_result_is_kept_under_its_name(tmp_path: Path) -> None:
    result = Result(name="wire", rows=[{"method": "grpc", "gb_per_second": 1.5}], ratios={"grpc/tcp": 0.5})
    path = harness.store(result, tmp_path)
    found = json.loads(path.read_text())
    assert path.name == "wire.json"
    assert found.keys() >= {"name", "machine", "date", "versions", "rows", "ratios"}
    assert found["ratios"] == {"grpc/tcp": 0.5}


def test_the_command_measures_the_bytes_of_every_family() -> None:
    done = subprocess.run([sys.executable, "-m", "launch", "bench", "bytes", "--quick", "--json"], capture_output=True,
                          text=True, timeout=60, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["name"] == "bytes"
    assert len(found["ratios"]) == len(registry.architectures())
    assert all(1.0 <= ratio <= 1.01 for ratio in found["ratios"].values())
    assert all(row["payload_bytes"] == row["necessary_bytes"] for row in found["rows"])
    assert "bytes" in SUITES
