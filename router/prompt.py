"""Messages or text to a prompt that workers take: template, tokens, pictures, limits. Blocking: runs on a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from router.reasoning import CLOSE, OPEN
from slipstream.checkpoint import Checkpoint
from slipstream.config import RouterConfig
from slipstream.errors import (
    CancelledError,
    ContextLengthError,
    InvalidRequestError,
    OverloadedError,
    RequestTooLargeError,
)
from slipstream.positions import merged_tokens
from slipstream.text import videos
from slipstream.text.chat import ChatTemplate
from slipstream.text.images import Picture, Still, decode
from slipstream.text.tokenizer import Tokenizer
from slipstream.text.videos import Frames

_CUT_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What is computed: every placeholder expanded, every picture resized."""

    tokens: tuple[int, ...]
    pictures: tuple[Picture, ...] = ()
    field: str
    """Of the request body, for what is wrong with it."""
    may_think: bool = False
    """Its answer may begin with thinking."""
    opens_thinking: bool = False
    """It ends with `<think>`, so the answer begins as thinking."""


class PictureBytes:
    """What the decoded pictures of all requests take, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self.lock = threading.Lock()


class Share:
    """One request's part of PictureBytes, from before its first picture is decoded until the request ends."""

    def __init__(self, of: PictureBytes) -> None:
        self._of = of
        self._taken = 0
        self._closed = False

    def take(self, count: int) -> None:
        """Called on a prompt thread before each picture. Raises OverloadedError where others hold too much,
        RequestTooLargeError where no wait would help, and CancelledError once nobody waits for the prompt."""
        of = self._of
        with of.lock:
            if self._closed:
                raise CancelledError("the prompt is no longer wanted")
            if self._taken + count > of.limit:
                raise RequestTooLargeError(f"the decoded pictures need more than {of.limit} bytes (router.max_pictures_bytes); "
                                           "send fewer or smaller ones", field="messages")
            if of.taken + count > of.limit:
                raise OverloadedError(f"pictures of other requests hold {of.taken} of {of.limit} bytes (router."
                                      "max_pictures_bytes); come back later", retry_after_seconds=1.0)
            self._taken += count
            of.taken += count

    def close(self) -> None:
        """Give everything back; what is still being decoded stops at its next picture."""
        with self._of.lock:
            self._closed = True
            self._of.taken -= self._taken
            self._taken = 0


class PromptBuilder:
    """Everything that a checkpoint says of its input side."""

    def __init__(self, checkpoint: Checkpoint, config: RouterConfig) -> None:
        """Raises CheckpointError where tokenizer or template are missing."""
        self.checkpoint = checkpoint
        self.tokenizer = Tokenizer(checkpoint.path)
        self._template = ChatTemplate(checkpoint.path, self.tokenizer.quote)
        self.thinks = self._template.thinks
        self._config = config

    def chat(self, messages: Sequence[dict[str, Any]], take: Callable[[int], None], tools: Sequence[dict[str, Any]] = (),
             values: Mapping[str, Any] | None = None) -> Prompt:
        """`messages` as the OpenAI API has them, checked for form already; `values`: what the template is told besides; `take`
        hears of each picture's bytes before it is decoded. Raises InvalidRequestError, and what `take` raises."""
        media = media_of(messages)
        self.admit(media)
        self._check_template(messages, tools, values or {})
        plain = [_plain(message, joined=self.checkpoint.vision is None) for message in messages]
        text = self._template.render(plain, tools, self._known(values or {}))
        opens = self.thinks and text.rstrip().endswith(OPEN)
        tokens = self._encode(self._with_times(text, media), "messages")
        image, limit = self.checkpoint.image, self._config.max_image_pixels
        pictures: list[Picture] = []
        for item in media:
            assert image is not None
            if isinstance(item, Still):
                pictures.append(decode(item.file(), image, max_pixels=limit, field=item.field, take=take))
            else:
                assert self.checkpoint.video is not None
                pictures += videos.decode(item, image, self.checkpoint.video, max_pixels=limit, take=take)
        return replace(self._finish(tokens, pictures, "messages"), opens_thinking=opens,
                       may_think=self.thinks and not text.rstrip().endswith(CLOSE))

    def _check_template(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any], values: Mapping[str, Any]) -> None:
        """Raise InvalidRequestError for what the template would leave out without a word."""
        names = self._template.names
        if "tools" not in names:
            if tools:
                raise InvalidRequestError("this model's chat template knows no tools; leave them out", field="tools")
            for number, message in enumerate(messages):
                if message["role"] == "tool" or "tool_calls" in message:
                    raise InvalidRequestError("this model's chat template knows no tools; leave their calls and results out",
                                              field=f"messages[{number}]" + (".tool_calls" if "tool_calls" in message else ""))
        for name in values.keys() - names:
            if name == "reasoning_effort" and values[name] == "none" and "enable_thinking" in names:
                continue
            field = "reasoning_effort" if name == "reasoning_effort" else f"chat_template_kwargs.{name[:64]}"
            raise InvalidRequestError(f"this model's chat template does not know {name[:64]!r}; leave it out", field=field)
        if taken := values.keys() & {"messages", "tools", "add_generation_prompt"}:
            raise InvalidRequestError(f"chat_template_kwargs cannot set {min(taken)}", field="chat_template_kwargs")

    def _known(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Without thinking is one thing, however it is asked for."""
        if values.get("reasoning_effort") == "none" and "reasoning_effort" not in self._template.names:
            return {**{name: value for name, value in values.items() if name != "reasoning_effort"}, "enable_thinking": False}
        return dict(values)

    def admit(self, media: Sequence[Still | Frames]) -> None:
        """Raise InvalidRequestError for what this model does not take, or too much of it."""
        if media and self.checkpoint.image is None:
            raise InvalidRequestError("this model is text-only; send the request without images", field=media[0].field)
        clips = [item for item in media if isinstance(item, Frames)]
        if clips and self.checkpoint.video is None:
            raise InvalidRequestError("this model takes no videos; send single pictures", field=clips[0].field)
        images, frames, config = len(media) - len(clips), sum(len(clip.stills) for clip in clips), self._config
        if images > config.max_images:
            raise InvalidRequestError(f"{images} images; a request may hold {config.max_images}", field="messages")
        if frames > config.max_video_frames:
            raise InvalidRequestError(f"{frames} frames of videos; a request may hold {config.max_video_frames} (router."
                                      "max_video_frames); send fewer, further apart", field="messages")

    def _with_times(self, text: str, media: Sequence[Still | Frames]) -> str:
        """A rendered text; where the model wants that, with a time and a place for each group of a video's frames, instead of
        the template's one place (of which transformers 5.24 leaves vision_start and vision_end around them)."""
        config, checkpoint = self.checkpoint.video, self.checkpoint
        clips = [item for item in media if isinstance(item, Frames)]
        if config is None or not config.timestamps or not clips:
            return text
        ids = (checkpoint.vision_start_token_id, checkpoint.video_token_id, checkpoint.vision_end_token_id)
        place = "".join(self.tokenizer.token_bytes(-1 if id is None else id).decode() for id in ids)
        head, *rest = text.split(place)
        if len(rest) != len(clips):
            raise InvalidRequestError(f"the chat template makes places for {len(rest)} videos and the request holds "
                                      f"{len(clips)}", field="messages")
        return head + "".join("".join(stamp + place for stamp in videos.stamps(clip, config)) + after
                              for clip, after in zip(clips, rest, strict=True))

    def text(self, text: str) -> Prompt:
        """A bare prompt; special tokens in it stay text."""
        if not text:
            raise InvalidRequestError("prompt is empty; send some text", field="prompt")
        return self._finish(self._encode(self.tokenizer.quote(text), "prompt"), [], "prompt")

    def ids(self, tokens: Sequence[int]) -> Prompt:
        """A prompt of token ids. Raises InvalidRequestError for an id outside the vocabulary."""
        for number, token in enumerate(tokens):
            if not 0 <= token < self.checkpoint.vocab_size:
                raise InvalidRequestError(f"prompt[{number}] is not in the vocabulary of {self.checkpoint.vocab_size} tokens",
                                          field="prompt")
        return self._finish(list(tokens), [], "prompt")

    def _encode(self, text: str, field: str) -> list[int]:
        """Tokens of the whole text. Raises ContextLengthError for one far too long, without work or memory for all of it.

        A cut text has at most a few more tokens at its cut than the whole has there; the quarter covers them many times.
        """
        limit = self.checkpoint.max_context
        size = 2 * limit
        while size < len(text):
            found = len(self.tokenizer.encode(text[:size]))
            if found > limit + limit // 4 + _CUT_TOKENS:
                raise ContextLengthError(f"more than {found} prompt tokens, and at least 1 output token, exceed the context of "
                                         f"{limit} tokens; shorten the prompt", field=field)
            size *= 2
        return self.tokenizer.encode(text)

    def max_tokens(self, prompt: Prompt, wanted: int | None, max_context: int) -> int:
        """Output tokens that the request may have. Raises ContextLengthError with the three numbers."""
        room = max_context - len(prompt.tokens)
        if room < 1 or (wanted is not None and wanted > room):
            asked = f"{wanted} output tokens" if wanted is not None else "at least 1 output token"
            raise ContextLengthError(f"{len(prompt.tokens)} prompt tokens (images included) and {asked} exceed the context of "
                                     f"{max_context} tokens; shorten the prompt or lower max_tokens",
                                     field=prompt.field if room < 1 else "max_tokens")
        return room if wanted is None else wanted

    def _finish(self, tokens: list[int], pictures: Sequence[Picture], field: str) -> Prompt:
        """Expand each picture's placeholder to as many tokens as it takes."""
        if not tokens:
            raise InvalidRequestError(f"{field} is empty; send some text", field=field)
        checkpoint = self.checkpoint
        if checkpoint.vision is None or checkpoint.image_token_id is None:
            return Prompt(tokens=tuple(tokens), field=field)
        merge = checkpoint.vision.merge_size
        marks = (checkpoint.image_token_id, checkpoint.video_token_id)
        found = [token for token in tokens if token in marks]
        if found != [marks[picture.is_video] for picture in pictures]:
            raise InvalidRequestError(f"the prompt has places for {len(found)} images and the request holds {len(pictures)}, "
                                      "or in another order; groups of a video's frames count", field=field)
        expanded: list[int] = []
        left = iter(pictures)
        for token in tokens:
            expanded.extend([token] * merged_tokens(next(left).grid, merge) if token in marks else [token])
        return Prompt(tokens=tuple(expanded), pictures=tuple(pictures), field=field)


def media_of(messages: Sequence[dict[str, Any]]) -> list[Still | Frames]:
    """The pictures and videos of checked messages, in order."""
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return [part[part["type"]] for part in parts if part["type"] != "text"]


def _plain(message: dict[str, Any], *, joined: bool) -> dict[str, Any]:
    """As the template takes it. `joined`: templates of text models add the content to a string."""
    content = message["content"]
    if isinstance(content, str):
        return message
    if joined:
        return {**message, "content": "\n".join(part["text"] for part in content)}
    return {**message, "content": [part if part["type"] == "text" else {"type": part["type"]} for part in content]}
