"""Suite `wire`: KV blocks of every layer from one process to another, by every channel, beside memcpy, TCP and naive gRPC."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from bench import harness
from bench.harness import Result, Row, Sample
from bench.pair import Pair
from bench.pool import BLOCKS, SMALL_BLOCKS, Job

JOBS = {"144 MiB shuffled": Job(SMALL_BLOCKS, True), "1 GiB shuffled": Job(BLOCKS, True), "1 GiB one run": Job(BLOCKS, False)}
SMALL, LARGE, RUN = JOBS
NAIVE = "unary per block"


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    name: str
    way: str
    transfer: dict[str, Any]
    pair: str = "plain"
    """Processes that it shares with others; an engine has its own, as its threads burn CPU also when nothing is moved."""


def methods() -> list[Method]:
    """Those that can run here."""
    found = [Method("memcpy", "memcpy", {}), Method("tcp", "tcp", {}), Method(NAIVE, "unary", {})]
    for channel in ("grpc", "local"):
        found += [Method(channel, "product", {"channel": channel, "checksum": False}),
                  Method(f"{channel} checksum", "product", {"channel": channel}),
                  Method(f"{channel} bare", "bare", {"channel": channel})]
    engines = (("rdma", "nixl_cu12", "nixl", "rdma tcp"), ("rdma cma", "nixl_cu12", "nixl", "rdma cma"),
               ("rdma mooncake", "mooncake.engine", "mooncake", "rdma mooncake"))
    for name, module, engine, pair in engines:
        if _imports(module):
            found.append(Method(name, "product", {"channel": "rdma", "checksum": False, "rdma": {"engine": engine}}, pair))
    return found


ENVIRONMENT = {"rdma tcp": {"UCX_TLS": "tcp"}}


def run(quick: bool) -> Result:
    """`quick`: one round of 144 MiB."""
    jobs = {SMALL: Job(SMALL_BLOCKS, True, SMALL_BLOCKS)} if quick else JOBS
    found = measure(methods(), jobs, 1 if quick else 8)
    return Result(name="wire", rows=rows(found), ratios=ratios(found))


def measure(chosen: Sequence[Method], jobs: Mapping[str, Job], count: int) -> dict[tuple[str, str], list[Sample]]:
    """Samples by job and method; the jobs are of one pool."""
    (pool, layers), = {(job.pool, job.layers) for job in jobs.values()}
    with ExitStack() as stack:
        pairs = {name: stack.enter_context(Pair(pool, ENVIRONMENT.get(name), layers))
                 for name in dict.fromkeys(method.pair for method in chosen)}
        for method in chosen:
            pairs[method.pair].open(method.name, method.way, method.transfer)
        for pair in pairs.values():
            pair.pause()
        moves = {(name, method.name): _move(pairs[method.pair], method, job) for name, job in jobs.items() for method in chosen
                 if method.name != NAIVE or name == SMALL}
        for move in list(moves.values())[: len(chosen)]:  # connect, probe, fill the allocator
            move()
        samples = harness.rounds({"|".join(key): move for key, move in moves.items()}, count)
    return {(job, name): samples[f"{job}|{name}"] for job, name in moves}


def rows(found: Mapping[tuple[str, str], Sequence[Sample]]) -> list[Row]:
    """For the table."""
    return [{"workload": job, "method": name, **harness.summary(each)} for (job, name), each in found.items()]


def _imports(module: str) -> bool:
    """In a process of its own: what these load stays loaded."""
    return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0


def _move(pair: Pair, method: Method, job: Job) -> Callable[[], Sample]:
    def move() -> Sample:
        pair.resume()
        try:
            return pair.move(method.name, job)
        finally:
            pair.pause()

    return move


def ratios(found: dict[tuple[str, str], list[Sample]]) -> dict[str, float]:
    """Round by round; of the 1 GiB jobs, in a quick run of the 144 MiB one."""
    speeds = {key: [sample.gigabytes_per_second for sample in each] for key, each in found.items()}
    large = LARGE if any(job == LARGE for job, _ in speeds) else SMALL
    wanted = {"grpc/tcp": ((large, "grpc"), (large, "tcp")), "grpc checksum/tcp": ((large, "grpc checksum"), (large, "tcp")),
              "grpc bare/tcp": ((large, "grpc bare"), (large, "tcp")),
              "local/memcpy": ((large, "local"), (large, "memcpy")),
              "local checksum/memcpy": ((large, "local checksum"), (large, "memcpy")),
              "local bare/memcpy": ((large, "local bare"), (large, "memcpy")),
              "rdma/tcp": ((large, "rdma"), (large, "tcp")), "rdma/memcpy": ((large, "rdma cma"), (large, "memcpy")),
              "mooncake/tcp": ((large, "rdma mooncake"), (large, "tcp")),
              "grpc/unary-per-block": ((SMALL, "grpc"), (SMALL, NAIVE)),
              "fragmented/contiguous": ((LARGE, "grpc"), (RUN, "grpc")),
              "local fragmented/contiguous": ((LARGE, "local"), (RUN, "local")),
              "rdma fragmented/contiguous": ((LARGE, "rdma"), (RUN, "rdma"))}
    return {name: harness.paired_ratio(speeds[ours], speeds[theirs]) for name, (ours, theirs) in wanted.items()
            if ours in speeds and theirs in speeds}
