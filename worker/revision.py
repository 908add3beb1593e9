"""A cheap, stable fingerprint of a checkpoint folder: two replicas with different weights never pair. Knows no tensor."""

from __future__ import annotations

from pathlib import Path

import xxhash

SAMPLES = 64
SAMPLE_BYTES = 4096


def weights_revision(folder: Path) -> str:
    """XXH3-128 over config.json, the shard index, and each weight file's size, header and evenly spaced samples of its bytes.

    Reads at most a few hundred kilobytes of each file, whatever its size; names and times of files do not count, contents do.
    """
    digest = xxhash.xxh3_128()
    for name in ("config.json", "model.safetensors.index.json"):
        path = folder / name
        data = path.read_bytes() if path.exists() else b""
        digest.update(f"{name} {len(data)}\n".encode())
        digest.update(data)
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            header = 8 + int.from_bytes(file.read(8), "little")
            for offset in _offsets(size, min(header, size)):
                file.seek(offset)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _offsets(size: int, header: int) -> list[int]:
    """Where to sample: all of the header, then evenly over the data, its last page included."""
    head = list(range(0, header, SAMPLE_BYTES))
    last = max(header, size - SAMPLE_BYTES)
    return head + sorted({header + (last - header) * i // (SAMPLES - 1) for i in range(SAMPLES)})
