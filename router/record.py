"""What `debug.record_dir` keeps of a request: enough to send it again, and what came of it. Knows no file and no HTTP."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from router.generate import Generation


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
        "cache_salt": request.cache_salt, "output": generation.dispatch.outputs(), "resumes": generation.dispatch.resumes,
        "code": "ok" if end is None or end.error is None else end.error.code,
        "seconds": (times.ended or time.monotonic()) - times.arrived,
        "ttft_seconds": None if times.first_token is None else times.first_token - times.arrived}
