"""What is told of a request: to `debug.record_dir`, enough to send it again; to its client, what it cost. Knows no file."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from router.actions import LegStats
from router.generate import Generation
from slipstream.types import Role


def record(generation: Generation) -> dict[str, Any]:
    """One request that has ended. Pictures are named by the hash of their pixels."""
    request, times, end = generation.request, generation.times, generation.end
    stop = dataclasses.asdict(request.stop)
    stop["stop_token_ids"] = sorted(request.stop.stop_token_ids)
    return {
        "time": time.time(), "id": request.id, "prompt": request.prompt.tokens,
        "pictures": [{"hash": picture.content_hash.hex(), "grid": dataclasses.astuple(picture.grid)}
                     for picture in request.prompt.pictures],
        "sampling": dataclasses.asdict(request.sampling), "stop": stop, "priority": request.priority,
        "cache_salt": request.cache_salt,
        "prompt_logprobs": request.prompt_logprobs,
        "grammar": None if request.grammar is None else request.grammar.text,
        "output": generation.dispatch.outputs(), "resumes": generation.dispatch.resumes,
        "code": "ok" if end is None or end.error is None else end.error.code,
        "seconds": (times.ended or time.monotonic()) - times.arrived,
        "ttft_seconds": None if times.first_token is None else times.first_token - times.arrived}


def report(generation: Generation) -> dict[str, float | int]:
    """The router's account of one request, for a client that asked for it."""
    times, stats = generation.times, generation.dispatch.stats
    prefill, decode = stats.get(Role.PREFILL), stats.get(Role.DECODE)
    first = times.first_token
    return {
        "kv_bytes": decode.kv_bytes if decode else 0, "state_bytes": decode.state_bytes if decode else 0,
        "transfer_seconds": decode.transfer_seconds if decode else 0.0,
        "queue_seconds": prefill.queue_seconds if prefill else decode.queue_seconds if decode else 0.0,
        "prefill_seconds": prefill.compute_seconds if prefill else 0.0,
        "decode_seconds": decode.compute_seconds if decode else 0.0,
        "ttft_seconds": first - times.arrived if first is not None else 0.0,
        "cached_tokens": (prefill or decode or LegStats()).cached_tokens, "resumes": generation.dispatch.resumes,
    }
