"""The messages of a chat request to checked ones; knows no model. A refusal names its field, and never echoes input."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from slipstream.errors import InvalidRequestError
from slipstream.text.videos import DEFAULT_FPS, Frames

_ROLES = ("system", "developer", "user", "assistant")
MIN_FPS, MAX_FPS = 0.01, 1000.0
MAX_SECONDS = 1e6


def as_object(value: Any, field: str) -> dict[str, Any]:
    """Raises InvalidRequestError for anything else."""
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{field} must be a JSON object", field=None if field == "the body" else field)
    return value


def checked_message(value: Any, number: int) -> dict[str, Any]:
    """A message as the template takes it: role and content only."""
    where = f"messages[{number}]"
    message = as_object(value, where)
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequestError(f"{where}.role must be one of {', '.join(_ROLES)}", field=f"{where}.role")
    for name, extra in message.items():
        if name not in ("role", "content", "name", "refusal", "annotations", "audio") and extra not in (None, [], {}):
            raise InvalidRequestError(f"{where}.{name[:64]} is not supported", field=f"{where}.{name[:64]}")
    return {"role": "system" if role == "developer" else role, "content": _content(message.get("content"), where, role)}


def _content(content: Any, where: str, role: str) -> str | list[dict[str, Any]]:
    field = f"{where}.content"
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(f"{field} must be a string, or a non-empty list of parts", field=field)
    return [_part(part, f"{field}[{i}]", role) for i, part in enumerate(content)]


def _part(value: Any, where: str, role: str) -> dict[str, Any]:
    part = as_object(value, where)
    kind = part.get("type")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{where}.text must be a string", field=f"{where}.text")
        return {"type": "text", "text": part["text"]}
    if kind == "image_url":
        if role != "user":
            raise InvalidRequestError(f"{where}: only a user message may hold images", field=where)
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        if not isinstance(url, str):
            raise InvalidRequestError(f"{where}.image_url.url must be a string", field=f"{where}.image_url.url")
        return {"type": "image_url", "image_url": {"url": url}}
    if kind in ("video", "video_url"):
        if role != "user":
            raise InvalidRequestError(f"{where}: only a user message may hold videos", field=where)
        return _video(part, f"{where}.{kind}", part.get(kind))
    raise InvalidRequestError(f"{where}.type must be text, image_url, video or video_url", field=f"{where}.type")


def _video(part: dict[str, Any], where: str, video: Any) -> dict[str, Any]:
    """Frames with their times: `video` as a list of data URLs of pictures, as Qwen's tools have it, or one URL of several, as
    vLLM has it: `data:video/jpeg;base64,` and the frames, with commas between."""
    options = {**(video if isinstance(video, dict) else {}), **part}
    url = video.get("url") if isinstance(video, dict) else video
    if isinstance(url, str) and url.lower().startswith("data:video/jpeg;base64,"):
        url = [f"data:image/jpeg;base64,{frame}" for frame in url.partition(",")[2].split(",")]
    if not isinstance(url, list) or not all(isinstance(frame, str) for frame in url):
        raise InvalidRequestError(f"{where} must be a list of frames, each the data URL of a picture; video files are not "
                                  "decoded", field=where)
    if len(url) < 2:
        raise InvalidRequestError(f"{where} has {len(url)} frames; send two or more, or a picture as image_url", field=where)
    seconds = options.get("timestamps")
    if seconds is None:
        fps = _number(options.get("fps", DEFAULT_FPS), f"{where}.fps", MIN_FPS, MAX_FPS)
        seconds = [i / fps for i in range(len(url))]
    elif not isinstance(seconds, list) or len(seconds) != len(url):
        raise InvalidRequestError(f"{where}.timestamps must be a list of {len(url)} numbers, the seconds of each frame",
                                  field=f"{where}.timestamps")
    else:
        seconds = [_number(value, f"{where}.timestamps", 0, MAX_SECONDS) for value in seconds]
        if any(b <= a for a, b in pairwise(seconds)):
            raise InvalidRequestError(f"{where}.timestamps must ascend", field=f"{where}.timestamps")
    return {"type": "video", "video": Frames(urls=tuple(url), seconds=tuple(seconds), field=where)}


def _number(value: Any, field: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidRequestError(f"{field} must be a number from {low:g} to {high:g}", field=field)
    return float(value)
