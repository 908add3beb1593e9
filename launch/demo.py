"""The demo: questions to a deployment, each answer checked. Knows the questions, not how a deployment is started."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from launch import client
from slipstream.errors import SlipstreamError

DATA = Path(__file__).parent / "demo_data"
LONGEST_SHOWN = 160


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question whose right answer is known."""

    title: str
    text: str
    answer: str = ""
    """All of it, to the letter."""
    says: str = ""
    """A part of it, where a model has words of its own."""
    image: Path | None = None

    def accepts(self, text: str) -> bool:
        """Whether the answer is right."""
        return self.says in text if self.says else text.strip() == self.answer


def questions(name: str = "questions") -> tuple[Question, ...]:
    """Those to the demo checkpoint that ships with the product, or to another model that is named."""
    rows = json.loads((DATA / f"{name}.json").read_text())
    return tuple(Question(**{**row, **({"image": DATA / row["image"]} if "image" in row else {})}) for row in rows)


class Demo:
    """Asks the questions of one deployment and prints what came back."""

    def __init__(self, console: Console, asked: Sequence[Question]) -> None:
        self._console, self._asked = console, asked

    async def run(self, urls: tuple[str, ...], stop: asyncio.Event) -> int:
        """The body of `slipstream demo`: 0 if every answer was right, 1 if not, 130 if it was stopped."""
        started, right = time.monotonic(), 0
        for question in self._asked:
            asking = asyncio.create_task(asyncio.to_thread(self._ask, urls[0], question))
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({asking, stopped}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if not asking.done():
                asking.cancel()
                return 130
            right += asking.result()
        self._say(f"{right} of {len(self._asked)} answers are right ({time.monotonic() - started:.1f} s)")
        return 0 if right == len(self._asked) else 1

    def _ask(self, url: str, question: Question) -> bool:
        self._console.rule(question.title, align="left")
        images = [question.image] if question.image else []
        self._say(f"  asked     {_shorten(question.text)}{f'  [{question.image.name}]' if question.image else ''}")
        self._say("  answered  ", end="")
        answer = client.Answer()
        try:
            for piece in client.stream_chat(url, [client.user_message(question.text, images)], answer):
                self._say(piece, end="")
        except SlipstreamError as error:
            self._say(f"\n  failed    {error}")
            return False
        self._say("")
        self._say(f"  took      {measures(answer)}")
        right = question.accepts(answer.text)
        if not right:
            self._say(f"  wrong     the right answer {f'says {question.says}' if question.says else f'is {question.answer}'}")
        return right

    def _say(self, text: str, end: str = "\n") -> None:
        self._console.print(text, end=end, markup=False, highlight=False, soft_wrap=True)


def measures(answer: client.Answer) -> str:
    """One line: latencies as the client saw them, bytes as the router accounts for them."""
    text = f"TTFT {answer.ttft_seconds * 1000:.0f} ms"
    if len(answer.token_seconds) > 1:
        text += f", ITL {answer.itl_seconds * 1000:.1f} ms"
    if "kv_bytes" in answer.report:
        text += f"; moved {_bytes(answer.report['kv_bytes'])} of KV and {_bytes(answer.report['state_bytes'])} of state"
    return text


def _bytes(count: float) -> str:
    return f"{count / 1024:,.1f} KiB" if count < 1 << 20 else f"{count / (1 << 20):,.2f} MiB"


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    if len(line) <= LONGEST_SHOWN:
        return line
    half = LONGEST_SHOWN // 2
    return f"{line[:half]} … {line[-half:]}"
