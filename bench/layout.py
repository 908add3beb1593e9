"""Suite `layout`: blocks whose layers lie apart (pieces of 64 KiB) against blocks with all layers in one piece (2.25 MiB)."""

from __future__ import annotations

from bench import harness, wire
from bench.harness import Result, Sample
from bench.pool import LAYERS, Job

METHODS = "memcpy", "tcp", "grpc", "local", "rdma", "rdma cma"
ORDERS = {"layer-major": LAYERS, "block-major": 1}


def run(quick: bool) -> Result:
    """`quick`: one round of a smaller pool. The two orders take turns, each with processes of its own."""
    blocks, rounds, turns = (64, 1, 1) if quick else (228, 3, 2)
    chosen = [method for method in wire.methods() if method.name in METHODS]
    found: dict[tuple[str, str], list[Sample]] = {}
    for _ in range(turns):
        for order, layers in ORDERS.items():
            for key, samples in wire.measure(chosen, {order: Job(blocks, True, blocks, layers)}, rounds).items():
                found.setdefault(key, []).extend(samples)
    cpu = {key: harness.summary(samples)["cpu_seconds_per_gib"] for key, samples in found.items()}
    ratios = {f"{method} CPU layer-major/block-major": cpu["layer-major", method] / cpu["block-major", method]
              for method in METHODS if ("layer-major", method) in cpu}
    return Result(name="layout", rows=wire.rows(found), ratios=ratios)
