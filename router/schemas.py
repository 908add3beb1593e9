"""Checks the forms that users ask for, in a process of its own: to compile one may take minutes, and only its end stops that.

`python -m router.schemas FOLDER VOCAB_SIZE EOS...`: a JSON string a line in, the error or an empty JSON string a line out.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from pathlib import Path

from slipstream.checkpoint import Checkpoint
from slipstream.errors import InvalidRequestError, SlipstreamError
from slipstream.text.grammar import Grammars
from slipstream.types import Grammar

KEPT = 1024
"""Verdicts that are kept."""
START_SECONDS = 60.0
"""For the process to come up and read the vocabulary."""
_MEMORY_BYTES = 4 << 30
_LINE_BYTES = 1 << 22
_PROBE = '{"grammars":[{"lark_grammar":"start: \\"a\\""}]}'


class Schemas:
    """The one process of a router, started when it is first needed. On the event loop."""

    def __init__(self, checkpoint: Checkpoint, max_bytes: int, seconds: float) -> None:
        self._command = [sys.executable, "-m", "router.schemas", str(checkpoint.path), str(checkpoint.vocab_size),
                         *map(str, sorted(checkpoint.eos_token_ids))]
        self._max_bytes, self._seconds = max_bytes, seconds
        self._process: Process | None = None
        self._lock = asyncio.Lock()
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()

    @property
    def running(self) -> bool:
        """True while the process is there."""
        return self._process is not None

    async def check(self, text: str) -> None:
        """`text`: as llguidance serialises grammars. Raises InvalidRequestError for one that no worker should be sent."""
        if len(text.encode()) > self._max_bytes:
            raise InvalidRequestError(f"the form of the answer is longer than {self._max_bytes} bytes "
                                      "(router.max_schema_bytes)", field="response_format")
        key = hashlib.sha256(text.encode()).digest()
        if key not in self._verdicts:
            async with self._lock:
                self._verdicts[key] = await self._ask(text)
            if len(self._verdicts) > KEPT:
                self._verdicts.popitem(last=False)
        if error := self._verdicts[key]:
            raise InvalidRequestError(error, field="response_format")

    async def _ask(self, text: str) -> str:
        if self._process is None:
            await self._exchange(_PROBE, START_SECONDS)
        try:
            return await self._exchange(text, self._seconds)
        except TimeoutError:
            return (f"the form of the answer is too complex: it could not be compiled in {self._seconds:g} seconds "
                    "(router.schema_seconds)")
        except (OSError, ValueError):
            return "the form of the answer is too complex: it could not be compiled"

    async def _exchange(self, text: str, seconds: float) -> str:
        """Raises TimeoutError, OSError and ValueError, after which the process is gone."""
        try:
            if self._process is None:
                self._process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL,
                                                                     limit=_LINE_BYTES)
            asked, told = self._process.stdin, self._process.stdout
            assert asked is not None, "it has pipes"
            assert told is not None, "it has pipes"
            asked.write(json.dumps(text).encode() + b"\n")
            async with asyncio.timeout(seconds):
                return str(json.loads(await told.readline()))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


def main() -> None:
    """The process."""
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    folder, vocab_size, *eos = sys.argv[1:]
    grammars = Grammars(Path(folder), int(vocab_size), list(map(int, eos)))
    for line in sys.stdin:
        try:
            grammars.matcher(Grammar(text=json.loads(line)))
            error = ""
        except SlipstreamError as refusal:
            error = refusal.message
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
