"""Suite `load`: a checkpoint from the page cache to a model's weights, against safetensors' load_file into memory of its own.

load_file alone maps the file and reads nothing; to have the same at the end, each of its tensors is copied once.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from bench import families, harness
from bench.harness import Result, Sample
from slipstream.checkpoint import Checkpoint
from slipstream.models import registry


def run(quick: bool) -> Result:
    """`quick`: one round of a quarter of the layers."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = families.write("Qwen3ForCausalLM", Path(folder), hidden_size=1536, intermediate_size=4096, head_dim=128,
                                    num_attention_heads=12, num_hidden_layers=4 if quick else 16, vocab_size=16384)
        file = Path(folder) / "model.safetensors"
        methods: dict[str, Callable[[], Sample]] = {
            "slipstream": partial(_timed, file, partial(_ours, checkpoint)),
            "load_file, copied": partial(_timed, file, partial(_theirs, file))}
        found = harness.rounds(methods, 1 if quick else 5)
    speeds = {name: [sample.gigabytes_per_second for sample in samples] for name, samples in found.items()}
    return Result(name="load", rows=[{"method": name, "bytes": samples[0].bytes, **harness.summary(samples)}
                                     for name, samples in found.items()],
                  ratios={"slipstream/load_file": harness.paired_ratio(speeds["slipstream"], speeds["load_file, copied"])})


def _timed(file: Path, load: Callable[[], object]) -> Sample:
    start, cpu = time.perf_counter(), time.process_time()
    held = load()
    took = Sample(bytes=file.stat().st_size, seconds=time.perf_counter() - start, cpu_seconds=time.process_time() - cpu)
    del held
    return took


def _ours(checkpoint: Checkpoint) -> object:
    return registry.load(checkpoint, dtype=torch.float32, device=torch.device("cpu"))


def _theirs(file: Path) -> object:
    return {name: tensor.clone() for name, tensor in load_file(file).items()}
